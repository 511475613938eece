#include "cli/parity_command.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cli/embedded_run.h"
#include "cli/parity_compare.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/run_file.h"

namespace moonpipe {
namespace {

using cluster::v1::TrainingRunSpec;

// Failures of a case that are printed; the rest is counted.
constexpr size_t kShownFailures = 12;

// A machine that does other work too must not fail a comparison.
constexpr double kPatienceSeconds = 120;

// The recorded training: AdamW at a constant rate over every parameter, no clipping, biases of the experts as they are.
absl::StatusOr<TrainingRunSpec> MakeSpec(const ParityFixture& fixture, const std::string& batch_case, const ParityArguments& arguments,
                                         uint32_t microbatches) {
  TrainingRunSpec spec;
  spec.mutable_model()->set_path(fixture.folder());
  spec.mutable_data()->set_batches(fixture.recording_path());
  spec.mutable_data()->set_batch_case(batch_case);
  spec.mutable_pipeline()->set_stages(arguments.stages);
  spec.mutable_pipeline()->set_microbatches(microbatches);
  spec.mutable_pipeline()->set_schedule(arguments.schedule);
  const ParityFixture::AdamW& adamw = fixture.adamw();
  const bool steps = fixture.Has(batch_case + "/adamw/losses");
  // One more than were recorded: the loss after the last of them.
  spec.mutable_train()->set_steps(steps ? adamw.steps + 1 : 1);
  spec.mutable_train()->set_max_grad_norm(0);
  spec.mutable_train()->set_expert_bias_rate(0);
  auto& optimizer = *spec.mutable_optimizer();
  optimizer.set_learning_rate(adamw.learning_rate > 0 ? adamw.learning_rate : 1e-3);
  if (adamw.steps > 0) {
    optimizer.set_beta1(adamw.beta1);
    optimizer.set_beta2(adamw.beta2);
    optimizer.set_epsilon(adamw.epsilon);
    optimizer.set_weight_decay(adamw.weight_decay);
  }
  optimizer.mutable_schedule()->set_kind(cluster::v1::LearningRateSchedule::KIND_CONSTANT);
  spec.mutable_checkpoint()->set_every_steps(steps ? adamw.steps : 0);
  spec.mutable_checkpoint()->set_keep_last(2);
  spec.mutable_checkpoint()->set_resume("never");
  spec.mutable_runtime()->set_step_timeout_seconds(kPatienceSeconds);
  spec.mutable_runtime()->set_heartbeat_timeout_seconds(kPatienceSeconds);
  return ParseRunFile(WriteYaml(spec), "the run of the recording", "/", arguments.overrides);
}

absl::StatusOr<ParityResult> RunCase(const ParityFixture& fixture, const std::string& batch_case, const ParityArguments& arguments,
                                     uint32_t microbatches, const std::string& runs_folder, size_t number) {
  EmbeddedRun run;
  MOONPIPE_ASSIGN_OR_RETURN(run.spec, MakeSpec(fixture, batch_case, arguments, microbatches));
  run.runs_folder = runs_folder;
  run.id = absl::StrCat("case-", number);
  run.quiet = true;
  ParityRun ran;
  run.on_step = [&](const cluster::v1::StepEvent& event) { ran.losses.push_back(event.loss()); };
  const std::string folder = absl::StrCat(runs_folder, "/", run.id);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return absl::InternalError(absl::StrCat("cannot create ", folder, ": ", error.message()));
  if (arguments.pin_routing) MOONPIPE_RETURN_IF_ERROR(WritePinnedRouting(fixture, batch_case, folder + "/pinned-routing.safetensors"));
  MOONPIPE_ASSIGN_OR_RETURN(const cluster::v1::TrainingRun ended, RunEmbedded(run));
  if (ended.state() != cluster::v1::TrainingRun::STATE_SUCCEEDED) {
    return absl::CancelledError(absl::StrCat(batch_case, " was stopped at step ", ended.step(), " of ", run.spec.train().steps()));
  }
  ran.observed_folder = folder + "/observed";
  if (run.spec.checkpoint().every_steps() > 0) ran.checkpoint = absl::StrFormat("%s/checkpoints/step-%08d", folder, fixture.adamw().steps);
  return CompareCase(fixture, batch_case, ran);
}

// How many microbatches each case is cut into: what was asked for, or for a case of fewer rows one a row. Refused where no case has as many
// rows. Every batch is read here, before any process starts.
absl::StatusOr<std::map<std::string, uint32_t>> CutCases(const ParityFixture& fixture, const std::vector<std::string>& cases, uint32_t wanted) {
  std::map<std::string, uint32_t> cut;
  size_t most = 0;
  for (const std::string& name : cases) {
    MOONPIPE_ASSIGN_OR_RETURN(const RecordedBatch batch, ReadRecordedBatch(fixture.recording(), name, fixture.config()));
    most = std::max(most, batch.layout.rows.size());
    cut[name] = std::min(wanted, static_cast<uint32_t>(batch.layout.rows.size()));
  }
  MOONPIPE_RETURN_IF_ERROR(DistributeRows(most, wanted).status());
  return cut;
}

void Print(const ParityResult& result, uint32_t microbatches, uint32_t wanted) {
  std::cout << result.name << (microbatches == wanted ? "" : absl::StrCat("  (", microbatches, " of ", wanted, " microbatches: it has no more rows)")) << "\n";
  for (const ParityGroup& group : result.groups) {
    const bool choices = group.name == "router choices";
    std::cout << absl::StrFormat("  %-32s %4d tensors   largest difference %s%s\n", group.name, group.tensors,
                                 choices ? absl::StrFormat("%.0f tokens", group.largest) : absl::StrFormat("%.2e", group.largest),
                                 group.failed == 0 ? "" : absl::StrFormat("   FAILED: %d, worst %s", group.failed, group.worst));
  }
  if (result.vision_cosine.has_value()) std::cout << absl::StrFormat("  least cosine of a feature row %.9f\n", *result.vision_cosine);
  if (result.last_token_kl.has_value()) {
    std::cout << absl::StrFormat("  last tokens' largest divergence %.2e, next token equal %.2f %%, five most likely shared %.2f %%\n",
                                 *result.last_token_kl, 100 * *result.top1_agreement, 100 * *result.top5_agreement);
  }
  for (size_t i = 0; i < std::min(result.failures.size(), kShownFailures); ++i) std::cout << "  FAILED " << result.failures[i] << "\n";
  if (result.failures.size() > kShownFailures) std::cout << "  and " << result.failures.size() - kShownFailures << " more\n";
  std::cout << std::flush;
}

}  // namespace

absl::Status ParityCommand(const ParityArguments& arguments) {
  const std::string folder = std::filesystem::absolute(arguments.fixture).lexically_normal().string();
  MOONPIPE_ASSIGN_OR_RETURN(const ParityFixture fixture, ParityFixture::Open(folder));
  const int64_t layers = fixture.config().text.num_hidden_layers;
  if (arguments.stages < 1 || arguments.stages > layers) {
    return absl::InvalidArgumentError(absl::StrCat("--stages ", arguments.stages, ": the model has ", layers, " decoder layers, and each stage takes at least one"));
  }
  const std::vector<std::string> known = fixture.cases();
  for (const std::string& name : arguments.cases) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return absl::NotFoundError(absl::StrCat("--case ", name, ": ", folder, " has ", absl::StrJoin(known, ", ")));
    }
  }
  const std::filesystem::path runs = std::filesystem::temp_directory_path() / absl::StrCat("moonpipe-parity-", ::getpid());
  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  std::vector<std::string> failed;
  size_t number = 0, tensors = 0;
  const std::vector<std::string>& chosen = arguments.cases.empty() ? known : arguments.cases;
  MOONPIPE_ASSIGN_OR_RETURN(const auto cut, CutCases(fixture, chosen, arguments.microbatches));
  for (const std::string& name : chosen) {
    absl::StatusOr<ParityResult> result = RunCase(fixture, name, arguments, cut.at(name), runs.string(), ++number);
    std::error_code ignored;
    std::filesystem::remove_all(runs, ignored);
    if (!result.ok()) return absl::Status(result.status().code(), absl::StrCat("case ", name, ": ", result.status().message()));
    for (const ParityGroup& group : result->groups) tensors += static_cast<size_t>(group.tensors);
    if (!result->failures.empty()) failed.push_back(name);
    if (arguments.json) {
      nlohmann::ordered_json one = result->ToJson();
      one["microbatches"] = cut.at(name);
      cases.push_back(std::move(one));
    } else {
      Print(*result, cut.at(name), arguments.microbatches);
    }
  }
  if (arguments.json) {
    const nlohmann::ordered_json all = {{"fixture", folder},
                                        {"stages", arguments.stages},
                                        {"microbatches", arguments.microbatches},
                                        {"schedule", arguments.schedule},
                                        {"pinned_routing", arguments.pin_routing},
                                        {"passed", failed.empty()},
                                        {"cases", cases}};
    std::cout << all.dump(2) << "\n";
  }
  if (!failed.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(failed.size(), " of ", number, " cases of ", folder, " differ from their recording: ", absl::StrJoin(failed, ", ")));
  }
  if (!arguments.json) std::cout << number << " cases with " << tensors << " tensors agree within the tolerances of " << folder << "/meta.json\n";
  return absl::OkStatus();
}

}  // namespace moonpipe
