#include "cli/embedded_run.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <iostream>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cli/control_client.h"
#include "cli/embedded_cluster.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/runtime/terminal.h"
#include "moonpipe/spec/flavors.h"
#include "nlohmann/json.hpp"

namespace moonpipe {

using cluster::v1::CreateTrainingRunRequest;
using cluster::v1::TrainingRun;
using cluster::v1::WatchTrainingRunResponse;

namespace {

// How long the coordinator may be silent, and how often it is looked for.
constexpr absl::Duration kCoordinatorSilence = absl::Seconds(9);
constexpr absl::Duration kLook = absl::Milliseconds(200);
constexpr absl::Duration kPatience = absl::Seconds(2);
// How long drained workers may take to leave.
constexpr absl::Duration kLeave = absl::Seconds(10);

std::atomic<int> interrupts = 0;
void CountInterrupt(int) { ++interrupts; }

// Names and addresses of the metrics pages, from services.json; none where it cannot be read.
std::vector<std::pair<std::string, std::string>> ReadMetricsPages(const std::string& run_folder) {
  std::vector<std::pair<std::string, std::string>> pages;
  const absl::StatusOr<std::string> text = ReadFile(run_folder + "/services.json");
  if (!text.ok()) return pages;
  const nlohmann::json services = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!services.is_array()) return pages;
  for (const auto& service : services) pages.emplace_back(service.value("name", ""), service.value("metrics_address", ""));
  return pages;
}

}  // namespace

absl::StatusOr<TrainingRun> RunEmbedded(const EmbeddedRun& run) {
  signal(SIGINT, CountInterrupt);
  signal(SIGTERM, CountInterrupt);
  MOONPIPE_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelOf(run.spec.model()));
  EmbeddedCluster::Options options;
  options.runs_folder = run.runs_folder;
  options.run_id = run.id;
  options.spec = run.spec;
  options.has_vision = config.vision.has_value();
  options.log_format = run.json ? "json" : "text";
  MOONPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<EmbeddedCluster> cluster, EmbeddedCluster::Start(options));

  auto client = std::make_unique<ControlClient>(cluster->coordinator_address());
  CreateTrainingRunRequest request;
  *request.mutable_spec() = run.spec;
  request.set_training_run_id(run.id);
  request.set_evaluate_only(run.evaluate_only);
  MOONPIPE_RETURN_IF_ERROR(client->Create(request).status());

  ProgressPrinter printer(STDOUT_FILENO, run.json ? StepOutput::kJson : StepOutput::kText);
  bool summary_printed = false;
  std::atomic<bool> watching = true;
  TrainingRun last;
  absl::Status watched;
  uint64_t steps_seen = 0;
  std::atomic<uint64_t> last_step = 0;
  std::thread watcher([&] {
    watched = client->Watch(RunName(run.id), 0, [&](const WatchTrainingRunResponse& event) {
      if (event.has_step()) {
        if (!run.quiet) printer.Step(event.step());
        if (run.on_step) run.on_step(event.step());
        ++steps_seen;
        last_step = event.step().step();
        return true;
      }
      last = event.training_run();
      last_step = std::max<uint64_t>(last_step, last.step());
      if (!summary_printed && !last.plan_summary().empty() && !run.json && !run.quiet) {
        printer.Line(last.plan_summary());
        for (const auto& [name, address] : ReadMetricsPages(last.folder())) {
          printer.Line(absl::StrFormat("metrics     %-16s http://%s/metrics", name, address));
        }
        summary_printed = true;
      }
      return true;
    });
    watching = false;
  });

  const auto where = [&] {
    const uint64_t steps = run.spec.train().steps();
    return absl::StrCat("step ", std::min<uint64_t>(last_step + 1, steps), " of ", steps);
  };
  // The watch ends with the run. Meanwhile: Ctrl-C, and a coordinator that is stopped, which no broken stream tells.
  absl::Time answered = absl::Now();
  int seen_interrupts = interrupts;
  absl::Status silent;
  absl::Time next_look = absl::Now();
  while (watching) {
    absl::SleepFor(kLook);
    if (interrupts > seen_interrupts) {
      seen_interrupts = interrupts;
      if (seen_interrupts > 1) {
        silent = absl::CancelledError("interrupted twice: stopped at once, without a checkpoint");
        client->CancelWatch();
        break;
      }
      std::cerr << "stopping after this step, with a checkpoint; Ctrl-C again stops at once" << std::endl;
      (void)client->Stop(RunName(run.id));
    }
    if (absl::Now() < next_look) continue;
    next_look = absl::Now() + absl::Seconds(1);
    if (client->Get(RunName(run.id), kPatience).ok()) answered = absl::Now();
    if (absl::Now() - answered > kCoordinatorSilence) {
      silent = absl::UnavailableError(absl::StrCat("coordinator (pid ", cluster->services().front().pid, ") has been silent for ",
                                                   absl::FormatDuration(kCoordinatorSilence), " at ", where(), "; is its process stopped?"));
      client->CancelWatch();
      break;
    }
  }
  watcher.join();
  const std::string resume = run.quiet ? "" : absl::StrCat("; to go on from the last checkpoint: moonpipe train ... --run-folder ", run.runs_folder,
                                                               "/", run.id);
  if (!silent.ok()) {
    cluster->Kill();
    return absl::Status(silent.code(), absl::StrCat(silent.message(), resume));
  }
  if (!watched.ok()) {
    // The stream broke: the coordinator is gone.
    absl::SleepFor(kLook);
    const std::optional<EmbeddedCluster::Failure> failure = cluster->FirstFailure();
    cluster->Kill();
    return absl::UnavailableError(failure.has_value()
                                      ? absl::StrCat(failure->what, " at ", where(), resume, "; ", failure->log)
                                      : absl::StrCat("coordinator does not answer at ", where(), ": ", watched.message(), resume));
  }
  if (last.state() == TrainingRun::STATE_FAILED) {
    cluster->Kill();
    return absl::UnavailableError(absl::StrCat(last.error(), resume));
  }
  const bool was_finished = steps_seen == 0 && last.state() == TrainingRun::STATE_SUCCEEDED && !run.evaluate_only;
  // Nobody reads its connection from now on, and the coordinator would wait for it to be closed.
  client.reset();
  if (!was_finished) {
    cluster->Finish(kLeave);
    return last;
  }
  // Workers that were still starting up are not known to the coordinator, so it cannot drain them.
  cluster->Kill();
  const std::string message = absl::StrCat("run ", run.id, " has finished: ", last.step(), " of ", run.spec.train().steps(),
                                           " steps are taken; raise train.steps to go on, or start a new run folder");
  if (run.json) {
    std::cerr << message << "\n";
  } else {
    printer.Line(message);
  }
  return last;
}

}  // namespace moonpipe
