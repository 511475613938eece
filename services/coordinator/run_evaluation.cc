#include "services/coordinator/run_session.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {

using cluster::v1::EvalResult;
using cluster::v1::TrainingRun;
using worker::v1::ConnectResponse;
using worker::v1::PublishManifest;

namespace {

constexpr EvalControl kControls[] = {{"none", false}, {"zero-features", true}, {"swap-pictures", false}};

}  // namespace

absl::StatusOr<EvalResult> RunSession::AnswerSet(const cluster::v1::EvalSet& set, const EvalControl& control, bool* pictures_in_pairs) {
  EvalResult result;
  result.set_set(set.name());
  result.set_control(control.name);
  std::vector<worker::v1::PartialAnswer> answers;
  std::vector<worker::v1::PartialAnswer> references;
  for (uint32_t round = 0; round <= spec_.eval().max_answer_tokens(); ++round) {
    MOONPIPE_RETURN_IF_ERROR(CheckStop());
    const uint64_t step = next_decode_step_++;
    ConnectResponse command;
    worker::v1::PrepareStep& prepare = *command.mutable_prepare_step();
    prepare.set_generation(generation_);
    prepare.set_step(step);
    *prepare.mutable_decode()->mutable_files() = set.files();
    prepare.mutable_decode()->set_control(control.name);
    for (const auto& answer : answers) *prepare.mutable_decode()->add_answers() = answer;
    pool_->Send(Dataloader(), std::move(command));
    MOONPIPE_ASSIGN_OR_RETURN(const PublishManifest published, AwaitManifest(step));
    if (round == 0) {
      references.assign(published.references().begin(), published.references().end());
      answers.resize(references.size());
      for (const auto& microbatch : published.manifest().microbatches()) {
        if (static_cast<int>(microbatch.samples_size()) * 2 > microbatch.grids_size()) *pictures_in_pairs = false;
      }
    } else {
      result.mutable_answers()->Assign(published.answer_texts().begin(), published.answer_texts().end());
    }
    const data::v1::StepManifest& manifest = published.manifest();
    if (manifest.microbatches().empty() || round == spec_.eval().max_answer_tokens()) break;
    MOONPIPE_RETURN_IF_ERROR(RunOnWorkers(step, manifest, /*decode=*/true, control.zero_features));
    std::vector<int32_t> next;
    for (const auto& [worker, report] : pool_->reports[step]) next.insert(next.end(), report.next_tokens().begin(), report.next_tokens().end());
    pool_->reports.erase(step);
    size_t document = 0;
    for (const auto& microbatch : manifest.microbatches()) {
      for (const uint64_t sample : microbatch.samples()) {
        if (document >= next.size() || sample >= answers.size()) {
          return absl::InternalError(absl::StrCat("decoding gave ", next.size(), " next tokens for more documents"));
        }
        const int32_t token = next[document++];
        answers[sample].add_tokens(token);
        // Every reference ends with the token that closes a turn.
        const auto& reference = references[sample].tokens();
        answers[sample].set_done(token == reference.Get(reference.size() - 1));
      }
    }
  }
  result.set_samples(references.size());
  for (size_t i = 0; i < references.size(); ++i) {
    const auto& a = answers[i].tokens();
    const auto& b = references[i].tokens();
    result.set_correct(result.correct() + std::equal(a.begin(), a.end(), b.begin(), b.end()));
  }
  return result;
}

absl::Status RunSession::Evaluate() {
  if (spec_.eval().sets().empty()) return absl::OkStatus();
  SetState(TrainingRun::STATE_EVALUATING);
  for (const cluster::v1::EvalSet& set : spec_.eval().sets()) {
    bool pictures_in_pairs = true;
    for (const EvalControl& control : kControls) {
      if (std::string(control.name) == "swap-pictures" && !pictures_in_pairs) continue;
      MOONPIPE_ASSIGN_OR_RETURN(EvalResult result, AnswerSet(set, control, &pictures_in_pairs));
      MP_LOG(INFO) << set.name() << " (" << control.name << "): " << result.correct() << " of " << result.samples() << " right";
      evals_.push_back(result);
      Update([&](TrainingRun& run) { *run.add_eval_results() = result; });
    }
  }
  return absl::OkStatus();
}

absl::Status RunSession::WriteReport() {
  RunReport report;
  report.steps = last_step_;
  report.training_seconds = absl::ToDoubleSeconds(training_time_);
  report.wall_seconds = absl::ToDoubleSeconds(absl::Now() - begin_);
  report.tokens_per_second = static_cast<double>(tokens_) / report.training_seconds;
  report.images_per_second = static_cast<double>(images_) / report.training_seconds;
  report.final_loss = last_loss_;
  if (peak_flops_ > 0) report.mfu = flops_ / report.training_seconds / peak_flops_;
  report.evals = evals_;
  return WriteFileAtomically(folder_ + "/report.json", report.ToJson());
}

}  // namespace moonpipe
