#include "cli/embedded_cluster.h"

#include <signal.h>

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

constexpr absl::Duration kCoordinatorStart = absl::Seconds(20);

// The services lie beside this program.
std::string ProgramFolder() { return std::filesystem::read_symlink("/proc/self/exe").parent_path().string(); }

}  // namespace

absl::StatusOr<std::unique_ptr<EmbeddedCluster>> EmbeddedCluster::Start(const Options& options) {
  std::unique_ptr<EmbeddedCluster> cluster(new EmbeddedCluster);
  cluster->folder_ = absl::StrCat(options.runs_folder, "/", options.run_id);
  const std::string logs = cluster->folder_ + "/logs";
  const std::string addresses = cluster->folder_ + "/addresses";
  std::error_code error;
  std::filesystem::create_directories(logs, error);
  std::filesystem::remove_all(addresses, error);
  std::filesystem::create_directories(addresses, error);
  if (error) return absl::InternalError(absl::StrCat("cannot create ", addresses, ": ", error.message()));
  const std::string programs = ProgramFolder();
  const std::string threads = absl::StrCat(options.spec.runtime().compute_threads());

  auto start = [&](const std::string& name, const std::string& program, std::vector<std::string> arguments) -> absl::Status {
    ProcessOptions process;
    process.name = name;
    process.arguments = {programs + "/" + program, "--address-file", addresses + "/" + name, "--log-format", options.log_format};
    process.arguments.insert(process.arguments.end(), arguments.begin(), arguments.end());
    // Intra-op threads are the run's, never the core count: libraries that read the environment must agree. Idle ones sleep, since several
    // processes share the cores; libgomp reads that when it is loaded, before any main.
    process.environment = {{"OMP_NUM_THREADS", threads}, {"MKL_NUM_THREADS", threads}, {"OMP_WAIT_POLICY", "PASSIVE"}};
    process.log_file = absl::StrCat(logs, "/", name, ".log");
    MOONPIPE_ASSIGN_OR_RETURN(std::unique_ptr<ChildProcess> child, ChildProcess::Start(process));
    ChildProcess* raw = child.get();
    cluster->processes_.push_back(std::move(child));
    raw->OnExit([cluster = cluster.get(), raw](const ProcessExit& exit) {
      if (exit.ok()) return;
      absl::MutexLock lock(&cluster->mutex_);
      // A worker that leaves because the coordinator is gone may be noticed first; it is not the cause.
      if (!cluster->failure_.has_value() || raw == cluster->processes_.front().get()) {
        cluster->failure_ = Failure{absl::StrCat(raw->name(), " (pid ", raw->pid(), ") ", exit.ToString()),
                                    absl::StrCat("its log ", raw->log_file(), " ends with:\n", raw->LogTail(5))};
      }
    });
    return absl::OkStatus();
  };

  MOONPIPE_RETURN_IF_ERROR(start("coordinator", "moonpipe-coordinator", {"--runs-folder", options.runs_folder}));
  MOONPIPE_ASSIGN_OR_RETURN(cluster->coordinator_address_,
                            WaitForAddress(cluster->processes_.front().get(), addresses + "/coordinator", kCoordinatorStart));
  const std::vector<std::string> dial = {"--coordinator", cluster->coordinator_address_};
  MOONPIPE_RETURN_IF_ERROR(start("dataloader", "moonpipe-dataloader", dial));
  std::vector<std::string> compute = dial;
  compute.insert(compute.end(), {"--socket-folder", addresses, "--peak-threads", threads});
  if (options.has_vision && options.spec.vision().placement() != cluster::v1::VisionSpec::PLACEMENT_FIRST_STAGE) {
    MOONPIPE_RETURN_IF_ERROR(start("vision-encoder", "moonpipe-vision-encoder", compute));
  }
  for (uint32_t stage = 0; stage < options.spec.pipeline().stages(); ++stage) {
    std::vector<std::string> arguments = compute;
    arguments.insert(arguments.end(), {"--ordinal", absl::StrCat(stage)});
    MOONPIPE_RETURN_IF_ERROR(start(absl::StrCat("decoder-stage-", stage), "moonpipe-decoder-stage", arguments));
  }
  return cluster;
}

EmbeddedCluster::~EmbeddedCluster() { Kill(); }

std::optional<EmbeddedCluster::Failure> EmbeddedCluster::FirstFailure() const {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

void EmbeddedCluster::Finish(absl::Duration grace) {
  const absl::Time deadline = absl::Now() + grace;
  for (size_t i = 1; i < processes_.size(); ++i) (void)processes_[i]->Wait(deadline);
  if (!processes_.empty()) TerminateAll({processes_.front().get()}, grace);
}

void EmbeddedCluster::Kill() {
  std::vector<ChildProcess*> running;
  for (const auto& process : processes_) {
    if (process->running()) {
      // A stopped process takes no SIGTERM.
      process->Signal(SIGCONT);
      running.push_back(process.get());
    }
  }
  TerminateAll(running, absl::Seconds(1));
}

std::vector<EmbeddedCluster::Service> EmbeddedCluster::services() const {
  std::vector<Service> services;
  for (const auto& process : processes_) services.push_back({process->name(), process->pid()});
  return services;
}

}  // namespace moonpipe
