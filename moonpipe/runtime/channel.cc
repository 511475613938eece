#include "moonpipe/runtime/channel.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace moonpipe {
namespace {

// Errors carry details in trailing metadata; gRPC's 8 KiB are tight for other servers' stack traces.
constexpr int kLargestMetadataBytes = 64 << 10;
constexpr int kFirstReconnectMs = 100;
constexpr int kOneAttemptMs = 5000;
constexpr int kSlowestReconnectMs = 2000;

int ToMs(absl::Duration duration) { return static_cast<int>(absl::ToInt64Milliseconds(duration)); }

}  // namespace

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const ChannelOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(options.max_receive_bytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, ToMs(options.keepalive));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, ToMs(options.keepalive_timeout));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_MAX_METADATA_SIZE, kLargestMetadataBytes);
  // The default backs off to two minutes: a coordinator that comes back would wait that long for its workers.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  // Despite its name this is the time that one attempt to connect is given.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kOneAttemptMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kSlowestReconnectMs);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (options.own_connection) arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto credentials = options.credentials != nullptr ? options.credentials : grpc::InsecureChannelCredentials();
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

absl::Status WaitForConnection(grpc::Channel* channel, const std::string& what, const std::string& address,
                               absl::Duration timeout) {
  if (channel->WaitForConnected(absl::ToChronoTime(absl::Now() + timeout))) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot reach the ", what, " at ", address, " within ",
                                             absl::FormatDuration(timeout),
                                             "; is it running, and is the address right?"));
}

void SetDeadline(grpc::ClientContext* context, absl::Duration timeout) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

}  // namespace moonpipe
