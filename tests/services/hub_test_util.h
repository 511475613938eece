// A WorkerHub behind a real server on loopback, and workers that are real CoordinatorClients.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "moonpipe/runtime/channel.h"
#include "moonpipe/runtime/coordinator_client.h"
#include "moonpipe/runtime/server.h"
#include "services/coordinator/worker_hub.h"

namespace moonpipe {

// Long enough for any machine, short enough to end a broken test.
inline absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

constexpr char kDigest[] = "a digest of protos";

inline worker::v1::Register RegistrationOf(common::v1::WorkerRole role, uint32_t ordinal = 0) {
  worker::v1::Register registration;
  registration.set_role(role);
  registration.set_ordinal(ordinal);
  registration.set_proto_digest(kDigest);
  registration.set_process_id(100 + ordinal);
  return registration;
}

class HubServer {
 public:
  HubServer() : hub({.proto_digest = kDigest, .heartbeat_period = absl::Milliseconds(20)}) {
    auto started = GrpcServer::Start({}, {{&hub, worker::v1::WorkerService::service_full_name()}});
    EXPECT_TRUE(started.ok()) << started.status();
    server = *std::move(started);
  }
  ~HubServer() {
    hub.Shutdown();
    server->Shutdown(absl::Seconds(1));
  }

  absl::StatusOr<std::unique_ptr<CoordinatorClient>> Connect(worker::v1::Register registration) {
    CoordinatorClient::Options options;
    options.channel = MakeChannel(server->address());
    options.registration = std::move(registration);
    return CoordinatorClient::Connect(std::move(options));
  }

  WorkerHub hub;
  std::unique_ptr<GrpcServer> server;
};

}  // namespace moonpipe
