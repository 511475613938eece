#include <CLI/CLI.hpp>

#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/runtime/main_flags.h"
#include "moonpipe/runtime/process_launcher.h"
#include "moonpipe/runtime/worker_process.h"
#include "services/coordinator/coordinator.h"

namespace moonpipe {
namespace {

absl::Status Serve(const ServiceFlags& flags, const std::string& runs_folder) {
  // Before any thread starts: the signals are taken here alone.
  ShutdownSignal shutdown;
  MOONPIPE_ASSIGN_OR_RETURN(const auto coordinator, Coordinator::Start(flags, runs_folder));
  MOONPIPE_RETURN_IF_ERROR(flags.WriteAddress(coordinator->address()));
  shutdown.Wait();
  MP_LOG(INFO) << "ending after a signal";
  coordinator->Stop();
  return absl::OkStatus();
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
