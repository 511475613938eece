#include <CLI/CLI.hpp>
#include <memory>

#include "moonpipe/runtime/process_launcher.h"
#include "moonpipe/runtime/worker_process.h"
#include "services/dataloader/dataloader_service.h"
#include "services/dataloader/dataloader_worker.h"

namespace moonpipe {
namespace {

absl::Status Serve(const WorkerProcess::Options& options) {
  DataloaderService service;
  absl::StatusOr<std::unique_ptr<WorkerProcess>> process =
      WorkerProcess::Start(options, {{&service, data::v1::DataService::service_full_name()}});
  if (!process.ok()) return process.status();
  return ServeDataloader(&(*process)->client(), &service, &(*process)->registry());
}

}  // namespace
}  // namespace moonpipe

int main(int argc, char** argv) {
  moonpipe::DieWithParent();
  CLI::App app("moonpipe's dataloader");
  moonpipe::WorkerProcess::Options options;
  options.role = moonpipe::common::v1::WORKER_ROLE_DATALOADER;
  options.flags.AddTo(&app, moonpipe::ServiceFlags::Dials::kCoordinator);
  app.add_option("--ordinal", options.ordinal, "Number among the dataloaders")->envname("MOONPIPE_ORDINAL");
  CLI11_PARSE(app, argc, argv);
  moonpipe::InitLogging("dataloader", options.flags.format());
  return moonpipe::ExitCode(moonpipe::Serve(options));
}
