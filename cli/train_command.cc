#include "cli/train_command.h"

#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cli/embedded_run.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/run_file.h"
#include "nlohmann/json.hpp"
#include "services/coordinator/checkpoint_ledger.h"

namespace moonpipe {

using cluster::v1::EvalResult;
using cluster::v1::TrainingRun;
using cluster::v1::TrainingRunSpec;

namespace {

// Letters, digits and hyphens, as an id of a run wants them.
std::string ToId(absl::string_view text) {
  std::string id;
  for (const char c : absl::AsciiStrToLower(text)) id += absl::ascii_isalnum(static_cast<unsigned char>(c)) ? c : '-';
  if (id.empty() || !absl::ascii_isalpha(static_cast<unsigned char>(id[0]))) id = "run-" + id;
  while (id.size() < 4) id += "-run";
  return id.substr(0, 63);
}

std::string Timestamp() { return absl::FormatTime("%Y%m%d-%H%M%S", absl::Now(), absl::LocalTimeZone()); }

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
