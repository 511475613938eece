// Client ends: channels with keepalive, limits and the seam for TLS, and deadlines, which every call must have.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"

namespace moonpipe {

struct ChannelOptions {
  // A longer answer fails the call with RESOURCE_EXHAUSTED. Views of microbatches need more than gRPC's 4 MiB.
  int max_receive_bytes = 4 << 20;
  // A peer that answers no ping for `keepalive_timeout` is taken for lost. gRPC raises `keepalive` to 10 s at least.
  absl::Duration keepalive = absl::Seconds(30);
  absl::Duration keepalive_timeout = absl::Seconds(10);
  // The seam for TLS; null speaks plain text.
  std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr;
  // A connection of its own, not one shared with other channels of this process to the same address.
  bool own_connection = false;
};

// Connects when first used. `address` is HOST:PORT or any target of gRPC, for example dns:///stages:7070. Proxies from
// the environment are not used.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const ChannelOptions& options = {});

// Waits until the channel is connected. UNAVAILABLE with `what` (for example "coordinator") and the address after
// `timeout`.
absl::Status WaitForConnection(grpc::Channel* channel, const std::string& what, const std::string& address,
                               absl::Duration timeout);

// Deadlines by kind of call.
inline constexpr absl::Duration kControlDeadline = absl::Seconds(5);
inline constexpr absl::Duration kHeartbeatDeadline = absl::Seconds(2);

// The call fails with DEADLINE_EXCEEDED after `timeout`.
void SetDeadline(grpc::ClientContext* context, absl::Duration timeout);

}  // namespace moonpipe
