// What every worker process has around its work: metrics page, gRPC server with health and reflection, and the registered stream to
// the coordinator. Starts in that order and ends in the reverse one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "moonpipe/common/v1/common.pb.h"
#include "moonpipe/metrics/metrics_server.h"
#include "moonpipe/metrics/registry.h"
#include "moonpipe/metrics/role_metrics.h"
#include "moonpipe/runtime/coordinator_client.h"
#include "moonpipe/runtime/main_flags.h"
#include "moonpipe/runtime/server.h"

namespace moonpipe {

class WorkerProcess {
 public:
  struct Options {
    ServiceFlags flags;
    common::v1::WorkerRole role = common::v1::WORKER_ROLE_UNSPECIFIED;
    uint32_t ordinal = 0;
    BuildInfo build;
    std::string device = "cpu";
    double peak_flops_per_second = 0;  // 0: not known, or a role without compute
    std::string peak_source = "unknown";
    std::string boot_id;
  };

  // The services must outlive the process object. Errors are those of the servers and of CoordinatorClient::Connect.
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(const Options& options, const std::vector<ServedService>& services);
  ~WorkerProcess();

  CoordinatorClient& client() { return *client_; }
  MetricsRegistry& registry() { return registry_; }

 private:
  explicit WorkerProcess(const BuildInfo& build) : registry_(build), rpc_metrics_(&registry_) {}

  MetricsRegistry registry_;
  RpcServerMetrics rpc_metrics_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<CoordinatorClient> client_;
};

// Prints a failure as the last word of a process and turns it into an exit code: 0, or 1.
int ExitCode(const absl::Status& status);

}  // namespace moonpipe
