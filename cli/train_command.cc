#include "cli/train_command.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cli/control_client.h"
#include "cli/embedded_cluster.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/runtime/terminal.h"
#include "moonpipe/spec/flavors.h"
#include "nlohmann/json.hpp"
#include "services/coordinator/checkpoint_ledger.h"

namespace moonpipe {

using cluster::v1::CreateTrainingRunRequest;
using cluster::v1::EvalResult;
using cluster::v1::TrainingRun;
using cluster::v1::TrainingRunSpec;
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

// Letters, digits and hyphens, as an id of a run wants them.
std::string ToId(absl::string_view text) {
  std::string id;
  for (const char c : absl::AsciiStrToLower(text)) id += absl::ascii_isalnum(static_cast<unsigned char>(c)) ? c : '-';
  if (id.empty() || !absl::ascii_isalpha(static_cast<unsigned char>(id[0]))) id = "run-" + id;
  while (id.size() < 4) id += "-run";
  return id.substr(0, 63);
}

std::string Timestamp() { return absl::FormatTime("%Y%m%d-%H%M%S", absl::Now(), absl::LocalTimeZone()); }

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

struct EmbeddedRun {
  std::string runs_folder;
  std::string id;
  TrainingRunSpec spec;
  bool evaluate_only = false;
  bool json = false;
};

// Runs to the end and returns the run's last state. The error is what a person should read.
absl::StatusOr<TrainingRun> RunEmbedded(const EmbeddedRun& run) {
  MOONPIPE_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelOf(run.spec.model()));
  EmbeddedCluster::Options options;
  options.runs_folder = run.runs_folder;
  options.run_id = run.id;
  options.spec = run.spec;
  options.has_vision = config.vision.has_value();
  options.log_format = run.json ? "json" : "text";
  MOONPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<EmbeddedCluster> cluster, EmbeddedCluster::Start(options));

  ControlClient client(cluster->coordinator_address());
  CreateTrainingRunRequest request;
  *request.mutable_spec() = run.spec;
  request.set_training_run_id(run.id);
  request.set_evaluate_only(run.evaluate_only);
  MOONPIPE_RETURN_IF_ERROR(client.Create(request).status());

  ProgressPrinter printer(STDOUT_FILENO, run.json ? StepOutput::kJson : StepOutput::kText);
  bool summary_printed = false;
  std::atomic<bool> watching = true;
  TrainingRun last;
  absl::Status watched;
  uint64_t steps_seen = 0;
  std::atomic<uint64_t> last_step = 0;
  std::thread watcher([&] {
    watched = client.Watch(RunName(run.id), 0, [&](const WatchTrainingRunResponse& event) {
      if (event.has_step()) {
        printer.Step(event.step());
        ++steps_seen;
        last_step = event.step().step();
        return true;
      }
      last = event.training_run();
      last_step = std::max<uint64_t>(last_step, last.step());
      if (!summary_printed && !last.plan_summary().empty() && !run.json) {
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
        client.CancelWatch();
        break;
      }
      std::cerr << "stopping after this step, with a checkpoint; Ctrl-C again stops at once" << std::endl;
      (void)client.Stop(RunName(run.id));
    }
    if (absl::Now() < next_look) continue;
    next_look = absl::Now() + absl::Seconds(1);
    if (client.Get(RunName(run.id), kPatience).ok()) answered = absl::Now();
    if (absl::Now() - answered > kCoordinatorSilence) {
      silent = absl::UnavailableError(absl::StrCat("coordinator (pid ", cluster->services().front().pid, ") has been silent for ",
                                                   absl::FormatDuration(kCoordinatorSilence), " at ", where(), "; is its process stopped?"));
      client.CancelWatch();
      break;
    }
  }
  watcher.join();
  const std::string resume = absl::StrCat("; to go on from the last checkpoint: moonpipe train ... --run-folder ", run.runs_folder,
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

void PrintEvals(const TrainingRun& run, bool answers) {
  for (const EvalResult& result : run.eval_results()) {
    const double percent = result.samples() == 0 ? 0 : 100.0 * static_cast<double>(result.correct()) / static_cast<double>(result.samples());
    std::cout << absl::StrFormat("%-14s %-14s %5.1f %%  (%d of %d)\n", result.set(), result.control() == "none" ? "" : result.control(),
                                 percent, result.correct(), result.samples());
    if (!answers) continue;
    for (int i = 0; i < result.answers_size(); ++i) {
      std::cout << result.set() << '\t' << result.control() << '\t' << i << '\t' << result.answers(i) << '\n';
    }
  }
}

}  // namespace

std::string NewRunId(const std::string& run_file) {
  const std::string stem = std::filesystem::path(run_file).stem().string();
  const std::string parent = std::filesystem::absolute(run_file).parent_path().filename().string();
  return absl::StrCat(ToId(stem == "run" ? parent : stem).substr(0, 40), "-", Timestamp());
}

absl::Status TrainCommand(const TrainArguments& arguments) {
  signal(SIGINT, CountInterrupt);
  signal(SIGTERM, CountInterrupt);
  std::vector<std::string> overrides = arguments.overrides;
  if (!arguments.resume.empty()) overrides.push_back(absl::StrCat("checkpoint.resume=", arguments.resume));
  EmbeddedRun run;
  MOONPIPE_ASSIGN_OR_RETURN(run.spec, LoadRunFile(arguments.run_file, overrides));
  std::filesystem::path folder = arguments.run_folder;
  if (folder.empty()) {
    folder = std::filesystem::path(arguments.runs_folder) / NewRunId(arguments.run_file);
  }
  folder = std::filesystem::absolute(folder).lexically_normal();
  if (folder.filename().empty()) folder = folder.parent_path();
  run.runs_folder = folder.parent_path().string();
  run.id = folder.filename().string();
  if (ToId(run.id) != run.id) {
    return absl::InvalidArgumentError(absl::StrCat("--run-folder ", folder.string(), ": the folder's name is the run's id: 4 to 63 "
                                                   "lower-case letters, digits and hyphens beginning with a letter, such as ",
                                                   ToId(run.id)));
  }
  run.json = arguments.json;
  MOONPIPE_ASSIGN_OR_RETURN(const TrainingRun ended, RunEmbedded(run));
  if (arguments.json) return absl::OkStatus();
  const std::string where = folder.string();
  PrintEvals(ended, /*answers=*/false);
  std::cout << (ended.state() == TrainingRun::STATE_STOPPED ? "stopped" : "finished") << " at step " << ended.step() << " of "
            << run.spec.train().steps() << "\n"
            << "checkpoints  " << where << "/checkpoints\n"
            << "metrics      " << where << "/metrics.jsonl, pages of the services while they run: " << where << "/services.json\n"
            << "tensorboard  " << where << "/tensorboard\n"
            << "trace        " << where << "/trace.json  (open in ui.perfetto.dev or chrome://tracing)\n"
            << "logs         " << where << "/logs\n";
  if (ended.state() == TrainingRun::STATE_SUCCEEDED) std::cout << "report       " << where << "/report.json\n";
  return absl::OkStatus();
}

absl::Status EvalCommand(const EvalArguments& arguments) {
  const std::filesystem::path given = std::filesystem::absolute(arguments.run_or_checkpoint).lexically_normal();
  std::string checkpoint = given.string();
  if (!std::filesystem::exists(given / kCheckpointManifestName)) {
    // A run: its newest whole checkpoint.
    if (!std::filesystem::is_directory(given / "checkpoints")) {
      return absl::NotFoundError(absl::StrCat(given.string(), " is neither a checkpoint (", kCheckpointManifestName,
                                              ") nor a run folder (checkpoints/)"));
    }
    std::string newest;
    for (const auto& entry : std::filesystem::directory_iterator(given / "checkpoints")) {
      if (ReadCheckpoint(entry.path().string(), Verify::kSizes).ok()) newest = std::max(newest, entry.path().string());
    }
    if (newest.empty()) return absl::NotFoundError(absl::StrCat(given.string(), " has no whole checkpoint"));
    checkpoint = newest;
  }
  MOONPIPE_ASSIGN_OR_RETURN(const CheckpointInfo info, ReadCheckpoint(checkpoint, Verify::kChecksums));
  EmbeddedRun run;
  run.evaluate_only = true;
  run.json = arguments.json;
  // The checkpoint brings model and tokenizer; nothing of the training data is needed.
  TrainingRunSpec spec = info.manifest.spec;
  spec.mutable_model()->Clear();
  spec.mutable_model()->set_path(checkpoint);
  spec.mutable_data()->set_tokenizer(checkpoint);
  spec.mutable_checkpoint()->set_resume("never");
  if (!arguments.files.empty()) {
    spec.mutable_eval()->clear_sets();
    for (const std::string& file : arguments.files) {
      cluster::v1::EvalSet* set = spec.mutable_eval()->add_sets();
      set->set_name(std::filesystem::path(file).stem().string());
      set->add_files(std::filesystem::absolute(file).string());
    }
  }
  if (spec.eval().sets().empty()) return absl::InvalidArgumentError("the run has no eval.sets; name the files of a held-out set");
  *spec.mutable_data()->mutable_train() = spec.eval().sets(0).files();
  MOONPIPE_ASSIGN_OR_RETURN(run.spec, ParseRunFile(WriteYaml(spec), "the checkpoint's run file", "/", arguments.overrides));
  const std::filesystem::path evals = std::filesystem::temp_directory_path() / absl::StrCat("moonpipe-eval-", ::getpid());
  run.runs_folder = evals.string();
  run.id = "eval-" + Timestamp();
  absl::StatusOr<TrainingRun> ended = RunEmbedded(run);
  if (!ended.ok()) return ended.status();
  std::error_code ignored;
  std::filesystem::remove_all(evals, ignored);
  if (!arguments.json) {
    PrintEvals(*ended, arguments.print_answers);
    return absl::OkStatus();
  }
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (const EvalResult& result : ended->eval_results()) {
    results.push_back({{"set", result.set()},
                       {"control", result.control()},
                       {"samples", result.samples()},
                       {"correct", result.correct()},
                       {"answers", std::vector<std::string>(result.answers().begin(), result.answers().end())}});
  }
  std::cout << results.dump() << "\n";
  return absl::OkStatus();
}

}  // namespace moonpipe
