#include "moonpipe/runtime/compute_main.h"

#include <CLI/CLI.hpp>
#include <memory>

#include "absl/strings/str_cat.h"
#include "moonpipe/comm/edge_connector.h"
#include "moonpipe/runtime/compute_worker.h"
#include "moonpipe/runtime/process_launcher.h"
#include "moonpipe/runtime/worker_process.h"

namespace moonpipe {
namespace {

absl::Status Serve(WorkerProcess::Options options, const std::string& socket_folder, int peak_threads) {
  options.boot_id = ReadBootId();
  options.peak_flops_per_second = MeasurePeakFlops(peak_threads);
  options.peak_source = "measured";
  options.build.torch = MOONPIPE_TORCH_VERSION;
  absl::StatusOr<std::unique_ptr<WorkerProcess>> process = WorkerProcess::Start(options, {});
  if (!process.ok()) return process.status();
  ComputeWorkerOptions worker;
  worker.client = &(*process)->client();
  worker.metrics = &(*process)->registry();
  const std::string& listen = options.flags.listen;
  worker.listen_host = listen.substr(0, listen.rfind(':'));
  worker.advertise_host = options.flags.advertise_host.empty() ? worker.listen_host : options.flags.advertise_host;
  worker.socket_folder = socket_folder;
  worker.boot_id = options.boot_id;
  worker.peak_flops_per_second = options.peak_flops_per_second;
  return ServeComputeWorker(worker);
}

}  // namespace

int RunComputeMain(int argc, char** argv, const std::string& name, common::v1::WorkerRole role) {
  SetEnvironmentForDeterminism(argv);
  DieWithParent();
  CLI::App app(absl::StrCat("moonpipe's ", name));
  WorkerProcess::Options options;
  options.role = role;
  options.flags.AddTo(&app, ServiceFlags::Dials::kCoordinator);
  app.add_option("--ordinal", options.ordinal, "Number among the workers of this role; stage N wishes N")
      ->envname("MOONPIPE_ORDINAL");
  std::string socket_folder;
  app.add_option("--socket-folder", socket_folder, "Where Unix sockets between workers of one host are made");
  int peak_threads = 1;
  app.add_option("--peak-threads", peak_threads, "Threads of the short measurement of the device's peak")->check(CLI::Range(1, 1024));
  CLI11_PARSE(app, argc, argv);
  InitLogging(role == common::v1::WORKER_ROLE_DECODER_STAGE ? absl::StrCat(name, "-", options.ordinal) : name,
              options.flags.format());
  return ExitCode(Serve(std::move(options), socket_folder, peak_threads));
}

}  // namespace moonpipe
