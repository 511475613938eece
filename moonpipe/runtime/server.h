// A running gRPC server as a handle: Start, address, destructor. Every service of moonpipe is served through it, so all
// have health, reflection, keepalive, limits and the histogram of calls.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/grpcpp.h"

namespace moonpipe {

// One finished call, as the histogram moonpipe_rpc_server_duration_seconds counts it. A service that is not served is
// "unknown".
struct FinishedRpc {
  std::string service;  // moonpipe.cluster.v1.ClusterService
  std::string method;   // CreateTrainingRun
  std::string code;     // OK, NOT_FOUND, ...; CANCELLED where the client left before an answer
  absl::Duration duration;
};

struct ServerOptions {
  // HOST:PORT; port 0 lets the system choose. Beyond loopback it needs `insecure` or `credentials`.
  std::string listen = "127.0.0.1:0";
  // A second, plain-text port that serves nothing but Health, for probes that speak no TLS; empty for none.
  std::string health_listen = "";
  // Allows plain text beyond loopback.
  bool insecure = false;
  // A longer request is refused with RESOURCE_EXHAUSTED. The control API keeps gRPC's own 4 MiB.
  int max_receive_bytes = 4 << 20;
  // The seam for TLS; null serves plain text.
  std::shared_ptr<grpc::ServerCredentials> credentials = nullptr;
  // Called once a call, on a thread of gRPC; must not block.
  std::function<void(const FinishedRpc&)> on_rpc = nullptr;
};

// `name` is the generated ClusterService::service_full_name(). The service must outlive the server.
struct ServedService {
  grpc::Service* service;
  std::string name;
};

class GrpcServer {
 public:
  // Binds and serves. INVALID_ARGUMENT for a bad or forbidden address, UNAVAILABLE for a port that is in use or an
  // address that is not of this machine; both name the flag to change.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const ServerOptions& options,
                                                           const std::vector<ServedService>& services);
  ~GrpcServer();
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // HOST:PORT with the port that was bound.
  const std::string& address() const { return address_; }
  // Empty without a health port.
  const std::string& health_address() const { return health_address_; }

  // Health of "", `readiness` and every service. They begin NOT_SERVING; `liveness` is SERVING until Shutdown.
  void SetReady(bool ready);

  // Not ready, no new calls, then waits at most `grace` for running calls before it cancels them. Blocks until the
  // server is down. Reactors must finish when they see OnCancel, or this waits forever.
  void Shutdown(absl::Duration grace);

 private:
  GrpcServer() = default;

  std::string address_;
  std::string health_address_;
  std::vector<std::string> service_names_;
  std::unique_ptr<grpc::CallbackGenericService> nothing_else_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::Server> health_server_;
};

}  // namespace moonpipe
