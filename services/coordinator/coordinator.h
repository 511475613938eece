// The coordinator as an object: its servers, and the thread that drives one run after another. `main` holds one; a test may hold one
// beside workers of the same process.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "moonpipe/metrics/metrics_server.h"
#include "moonpipe/metrics/registry.h"
#include "moonpipe/metrics/role_metrics.h"
#include "moonpipe/runtime/main_flags.h"
#include "moonpipe/runtime/server.h"
#include "services/coordinator/control_service.h"
#include "services/coordinator/run_registry.h"
#include "services/coordinator/worker_hub.h"

namespace moonpipe {

class Coordinator {
 public:
  // Serves the control API and the workers' streams on the flags' addresses. Errors are those of the servers: a port in use, a
  // plain-text listener that nobody asked for. Runs get their folders below `runs_folder`.
  static absl::StatusOr<std::unique_ptr<Coordinator>> Start(const ServiceFlags& flags, const std::string& runs_folder);
  // Stops, if nobody has.
  ~Coordinator();

  // Where others dial, and where the metrics page is; both host:port.
  const std::string& address() const { return address_; }
  const std::string& metrics_address() const { return metrics_->address(); }

  // Ends an active run after the step in progress, with a checkpoint; drains the workers and waits for them to leave, a few seconds at
  // most; ends the servers. Blocks.
  void Stop();

 private:
  explicit Coordinator(const std::string& runs_folder);

  MetricsRegistry registry_;
  RpcServerMetrics rpc_metrics_;
  std::unique_ptr<MetricsServer> metrics_;
  WorkerHub hub_;
  RunRegistry runs_;
  ControlService control_;
  std::unique_ptr<GrpcServer> server_;
  std::string address_;
  std::atomic<bool> ending_ = false;
  std::thread driver_;
};

}  // namespace moonpipe
