#include <signal.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <memory>
#include <thread>

#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/metrics/metrics_server.h"
#include "moonpipe/metrics/role_metrics.h"
#include "moonpipe/proto_digest.h"
#include "moonpipe/runtime/main_flags.h"
#include "moonpipe/runtime/process_launcher.h"
#include "moonpipe/runtime/server.h"
#include "moonpipe/runtime/worker_process.h"
#include "services/coordinator/control_service.h"
#include "services/coordinator/run_driver.h"
#include "services/coordinator/run_registry.h"
#include "services/coordinator/worker_hub.h"

namespace moonpipe {
namespace {

absl::Status Serve(const ServiceFlags& flags, const std::string& runs_folder) {
  // Signals are taken on this thread alone, by sigwait below.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  MetricsRegistry registry;
  RpcServerMetrics rpc_metrics(&registry);
  MOONPIPE_ASSIGN_OR_RETURN(const auto metrics, MetricsServer::Start(flags.metrics_listen, flags.insecure, registry));
  WorkerHub hub({.proto_digest = kProtoDigest});
  RunRegistry runs(runs_folder);
  ControlService control(&runs);
  ServerOptions server_options;
  server_options.listen = flags.listen;
  server_options.health_listen = flags.health_listen;
  server_options.insecure = flags.insecure;
  // Reports and manifests grow with the model; the control API's requests stay small all the same.
  server_options.max_receive_bytes = 64 << 20;
  server_options.on_rpc = [&](const FinishedRpc& rpc) { rpc_metrics.Observe(rpc.service, rpc.method, rpc.code, rpc.duration); };
  MOONPIPE_ASSIGN_OR_RETURN(const auto server,
                            GrpcServer::Start(server_options, {{&control, cluster::v1::ClusterService::service_full_name()},
                                                               {&hub, worker::v1::WorkerService::service_full_name()}}));
  MOONPIPE_ASSIGN_OR_RETURN(const std::string address, flags.AdvertisedAddress(server->address()));

  std::atomic<bool> ending = false;
  uint64_t generation = 0;
  std::thread driver([&] {
    const RunDriverOptions options{&hub, &runs, &registry, &generation};
    while (!ending) {
      const auto job = runs.WaitForJob(absl::Now() + absl::Milliseconds(200));
      if (job.ok()) DriveRun(options, *job);
    }
  });
  server->SetReady(true);
  MP_LOG(INFO) << "serving on " << address << ", metrics on " << metrics->address();
  absl::Status status = flags.WriteAddress(address);
  if (status.ok()) {
    int signal = 0;
    sigwait(&signals, &signal);
    MP_LOG(INFO) << "ending after signal " << signal;
  }
  server->SetReady(false);
  ending = true;
  // An active run stops after the step in progress, with a checkpoint.
  for (const auto& run : runs.List()) {
    if (!HasEnded(run.state())) (void)runs.Command(run.name(), RunCommand::kStop, "");
  }
  driver.join();
  hub.Shutdown();
  server->Shutdown(absl::Seconds(2));
  return status;
}

}  // namespace
}  // namespace moonpipe

int main(int argc, char** argv) {
  moonpipe::DieWithParent();
  CLI::App app("moonpipe's coordinator");
  moonpipe::ServiceFlags flags;
  flags.AddTo(&app, moonpipe::ServiceFlags::Dials::kNobody);
  std::string runs_folder = "runs";
  app.add_option("--runs-folder", runs_folder, "Where each run gets its folder")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  moonpipe::InitLogging("coordinator", flags.format());
  return moonpipe::ExitCode(moonpipe::Serve(flags, runs_folder));
}
