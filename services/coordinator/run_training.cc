#include "services/coordinator/run_session.h"

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/fault_point.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/train/lr_schedule.h"
#include "services/coordinator/edge_traffic.h"
#include "services/coordinator/run_step_builder.h"
#include "services/coordinator/step_commit.h"

namespace moonpipe {

using cluster::v1::StepEvent;
using cluster::v1::TrainingRun;
using worker::v1::ConnectResponse;
using worker::v1::PublishManifest;
using worker::v1::StepReport;

void RunSession::Prepare(uint64_t step) {
  if (step <= prepared_step_ || step > spec_.train().steps()) return;
  ConnectResponse command;
  command.mutable_prepare_step()->set_generation(generation_);
  command.mutable_prepare_step()->set_step(step);
  pool_->Send(Dataloader(), std::move(command));
  prepared_step_ = step;
}

absl::StatusOr<PublishManifest> RunSession::AwaitManifest(uint64_t step) {
  MOONPIPE_RETURN_IF_ERROR(pool_->Await(
      absl::StrCat("the dataloader made step ", step), StepDeadline(), [&] { return pool_->manifests.contains(step); },
      [&] { return std::vector<uint32_t>{Dataloader()}; }));
  auto manifest = pool_->manifests.extract(step);
  if (!manifest.mapped().error().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("the dataloader cannot make step ", step, ": ", manifest.mapped().error()));
  }
  return std::move(manifest.mapped());
}

absl::Status RunSession::RunOnWorkers(uint64_t step, const data::v1::StepManifest& manifest, bool decode, bool zero_features) {
  MOONPIPE_RETURN_IF_ERROR(CheckMessagesFit(plan_, config_, manifest));
  MOONPIPE_ASSIGN_OR_RETURN(const auto steps, MakeRunSteps(plan_, manifest, decode, zero_features));
  const std::map<uint32_t, double> flops = decode ? std::map<uint32_t, double>() : ShareFlops(manifest);
  if (!decode) MOONPIPE_RETURN_IF_ERROR(FaultPoint("before_run_step", step));
  for (const auto& [worker, run] : steps) {
    ConnectResponse command;
    *command.mutable_run_step() = run;
    if (!decode) command.mutable_run_step()->set_model_flops(flops.at(worker));
    if (!decode && step == 1 && spec_.data().has_batches()) ObserveRecorded(*command.mutable_run_step());
    pool_->Send(worker, std::move(command));
  }
  if (!decode) MOONPIPE_RETURN_IF_ERROR(FaultPoint("after_run_step", step));
  return pool_->Await(
      absl::StrCat(decode ? "decoding step " : "step ", step, " ran with microbatches 0 to ", manifest.microbatches_size() - 1),
      StepDeadline(),
      [&] { return Missing(pool_->reports[step]).empty(); }, [&] { return Missing(pool_->reports[step]); });
}

std::map<uint32_t, double> RunSession::ShareFlops(const data::v1::StepManifest& manifest) const {
  std::map<uint32_t, double> shares;
  if (plan_.encoder.has_value()) {
    PartRange tower;
    tower.has_vision = true;
    shares[*plan_.encoder] = static_cast<double>(CountTrainingFlops(config_, tower, manifest, frozen_).total());
  }
  for (size_t stage = 0; stage < plan_.stages.size(); ++stage) {
    shares[plan_.stages[stage]] = static_cast<double>(CountTrainingFlops(config_, plan_.parts[stage], manifest, frozen_).total());
  }
  return shares;
}

void RunSession::ObserveRecorded(worker::v1::RunStep& run) const {
  run.set_observe_folder(folder_ + "/observed");
  const std::string pinned = folder_ + "/pinned-routing.safetensors";
  if (std::filesystem::exists(pinned)) run.set_pinned_routing(pinned);
}

absl::Status RunSession::AwaitCommitted(uint64_t step) {
  if (!unacknowledged_) return absl::OkStatus();
  MOONPIPE_RETURN_IF_ERROR(pool_->Await(
      absl::StrCat("the workers committed step ", step), StepDeadline(), [&] { return Missing(pool_->committed[step]).empty(); },
      [&] { return Missing(pool_->committed[step]); }));
  pool_->committed.erase(step);
  unacknowledged_ = false;
  return absl::OkStatus();
}

absl::Status RunSession::TakeStep(uint64_t step) {
  const absl::Time begin = absl::Now();
  Prepare(step);
  MOONPIPE_ASSIGN_OR_RETURN(const PublishManifest published, AwaitManifest(step));
  const data::v1::StepManifest& manifest = published.manifest();
  MOONPIPE_RETURN_IF_ERROR(journal_->CheckReplay(step, manifest.digest()));
  for (const auto& skipped : manifest.skipped()) {
    MP_LOG(WARNING) << "skipped sample " << skipped.sample() << " (" << skipped.key() << "): " << skipped.reason() << ": "
                    << skipped.detail();
  }
  Prepare(step + 1);  // the dataloader works ahead while the step runs
  MOONPIPE_RETURN_IF_ERROR(RunOnWorkers(step, manifest, /*decode=*/false, /*zero_features=*/false));
  MOONPIPE_RETURN_IF_ERROR(AwaitCommitted(last_step_));

  const std::map<uint32_t, StepReport> reports = std::move(pool_->reports[step]);
  pool_->reports.erase(step);
  StepInputs inputs;
  inputs.generation = generation_;
  inputs.step = step;
  inputs.manifest = &manifest;
  for (const WorkerInfo& member : pool_->members()) {
    if (Computes(member)) inputs.workers.push_back(member.id);
  }
  inputs.parameter_names = norm_names_;
  inputs.max_grad_norm = spec_.train().max_grad_norm();
  MOONPIPE_ASSIGN_OR_RETURN(const StepDecision decision, DecideStep(inputs, reports));
  MOONPIPE_RETURN_IF_ERROR(CheckEdgeTraffic(plan_, manifest, config_, reports));

  const double factor = LearningRateFactor(spec_.optimizer().schedule(), spec_.train().steps(), step - 1);
  JournalEntry entry;
  entry.step = step;
  entry.generation = generation_;
  entry.manifest_digest = manifest.digest();
  entry.loss = decision.loss;
  entry.grad_norm = decision.grad_norm;
  entry.clip_factor = decision.clip_factor;
  entry.skip_reason = decision.skip_reason;
  entry.next_cursor = manifest.next_cursor();
  MOONPIPE_RETURN_IF_ERROR(FaultPoint("before_journal", step));
  // Nothing has changed anywhere until this line is on disk; from here on the step counts.
  MOONPIPE_RETURN_IF_ERROR(journal_->Append(entry));
  MOONPIPE_RETURN_IF_ERROR(FaultPoint("after_journal", step));
  ConnectResponse command;
  if (decision.commit) {
    worker::v1::CommitStep& commit = *command.mutable_commit_step();
    commit.set_generation(generation_);
    commit.set_step(step);
    commit.set_clip_factor(decision.clip_factor);
    commit.set_learning_rate_factor(factor);
    for (const auto& counts : decision.expert_counts) *commit.add_expert_counts() = counts;
    for (const auto& logits : decision.largest_logits) *commit.add_largest_logits() = logits;
  } else {
    command.mutable_skip_step()->set_generation(generation_);
    command.mutable_skip_step()->set_step(step);
    command.mutable_skip_step()->set_reason(decision.skip_reason);
    MP_LOG(WARNING) << "step " << step << " is skipped: " << decision.skip_reason;
  }
  for (const WorkerInfo& member : pool_->members()) {
    if (Computes(member)) pool_->Send(member.id, command);
  }
  MOONPIPE_RETURN_IF_ERROR(FaultPoint("after_commit", step));
  unacknowledged_ = true;
  last_step_ = step;
  cursor_ = manifest.next_cursor();

  StepEvent event;
  event.set_step(step);
  event.set_total_steps(spec_.train().steps());
  event.set_loss(decision.loss);
  event.set_grad_norm(decision.grad_norm);
  event.set_learning_rate(factor * spec_.optimizer().learning_rate());
  for (const auto& microbatch : manifest.microbatches()) {
    event.set_tokens(event.tokens() + microbatch.tokens());
    event.set_trained_labels(event.trained_labels() + microbatch.trained_labels());
    event.set_images(event.images() + static_cast<uint64_t>(microbatch.grids_size()));
    event.set_samples(event.samples() + static_cast<uint64_t>(microbatch.samples_size()));
  }
  const auto flops = static_cast<double>(CountTrainingFlops(config_, manifest, frozen_).total());
  event.set_model_flops(flops);
  event.set_bubble_ratio(decision.bubble_ratio);
  for (const auto& [worker, report] : reports) {
    event.set_peak_memory_bytes(std::max(event.peak_memory_bytes(), report.peak_memory_bytes()));
    const std::optional<WorkerInfo> info = pool_->Latest(worker);
    if (info.has_value()) trace_.Add(step, info->ShortName(), info->clock_offset, report);
  }
  trace_.AddStep(step, begin, absl::Now());
  event.set_skip_reason(decision.skip_reason);
  const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  event.set_seconds(seconds);
  if (peak_flops_ > 0) event.set_mfu(flops / seconds / peak_flops_);
  ++steps_here_;
  step_seconds_ += seconds;
  tokens_ += event.tokens();
  images_ += event.images();
  flops_ += flops;
  last_loss_ = decision.loss;
  event.set_eta_seconds(step_seconds_ / static_cast<double>(steps_here_) * static_cast<double>(spec_.train().steps() - step));
  metrics_log_->Append(event);
  tensorboard_->Append(event, absl::Now());
  double loss_max = 0;
  for (const auto& [worker, report] : reports) {
    for (const auto& loss : report.losses()) {
      if (loss.trained_labels() > 0) loss_max = std::max(loss_max, loss.loss_sum() / static_cast<double>(loss.trained_labels()));
    }
  }
  metrics_->balance_loss.Set(decision.balance_loss);
  ObserveStep(event, manifest, loss_max);
  options_.runs->PublishStep(job_.id, event);
  return absl::OkStatus();
}

absl::StatusOr<TrainingRun::State> RunSession::Train() {
  SetState(TrainingRun::STATE_RUNNING);
  const absl::Time begin = absl::Now();
  const uint64_t every = spec_.checkpoint().every_steps();
  bool stopped = false;
  if (last_step_ < spec_.train().steps()) {
    // Of a shorter run in this folder; while it stands, the run counts as finished.
    std::error_code ignored;
    std::filesystem::remove(folder_ + "/report.json", ignored);
    tensorboard_.emplace(folder_ + "/tensorboard", last_step_ + 1, absl::Now());
  }
  while (last_step_ < spec_.train().steps()) {
    const RunRegistry::Wishes wishes = options_.runs->TakeWishes(job_.id, last_step_);
    if (wishes.save) MOONPIPE_RETURN_IF_ERROR(Save(last_step_));
    if (wishes.stop) {
      stopped = true;
      break;
    }
    if (wishes.pause) {
      if (options_.runs->Get(job_.run.name())->state() != TrainingRun::STATE_PAUSED) {
        MOONPIPE_RETURN_IF_ERROR(AwaitCommitted(last_step_));
        SetState(TrainingRun::STATE_PAUSED);
      }
      options_.runs->WaitWhilePaused(job_.id, absl::Now() + absl::Milliseconds(200));
      // Keeps noticing workers that leave or fall silent.
      MOONPIPE_RETURN_IF_ERROR(pool_->Await("the run was paused", absl::InfiniteFuture(), [] { return true; }, [] { return std::vector<uint32_t>(); }));
      continue;
    }
    if (options_.runs->Get(job_.run.name())->state() == TrainingRun::STATE_PAUSED) SetState(TrainingRun::STATE_RUNNING);
    MOONPIPE_RETURN_IF_ERROR(TakeStep(last_step_ + 1));
    if (every != 0 && last_step_ % every == 0) MOONPIPE_RETURN_IF_ERROR(Save(last_step_));
  }
  MOONPIPE_RETURN_IF_ERROR(AwaitCommitted(last_step_));
  training_time_ = absl::Now() - begin;
  if (steps_here_ > 0) MOONPIPE_RETURN_IF_ERROR(WriteFileAtomically(folder_ + "/trace.json", trace_.ToJson()));
  MOONPIPE_RETURN_IF_ERROR(Save(last_step_));
  return stopped ? TrainingRun::STATE_STOPPED : TrainingRun::STATE_SUCCEEDED;
}

void RunSession::ObserveStep(const StepEvent& event, const data::v1::StepManifest& manifest, double loss_max) {
  if (!event.skip_reason().empty()) {
    metrics_->skipped_steps(event.skip_reason()).Add();
  } else {
    metrics_->steps.Add();
    metrics_->loss.Set(event.loss());
    metrics_->grad_norm.Set(event.grad_norm());
    metrics_->loss_max.Set(loss_max);
  }
  uint64_t image_tokens = 0;
  for (const auto& microbatch : manifest.microbatches()) image_tokens += microbatch.feature_rows();
  metrics_->image_tokens.Add(static_cast<double>(image_tokens));
  metrics_->text_tokens.Add(static_cast<double>(event.tokens() - image_tokens));
  metrics_->images.Add(static_cast<double>(event.images()));
  metrics_->samples.Add(static_cast<double>(event.samples()));
  const double factor = event.learning_rate() / spec_.optimizer().learning_rate();
  metrics_->vision_learning_rate.Set(factor * PeakRate(ModelPartKind::kVision));
  metrics_->projector_learning_rate.Set(factor * PeakRate(ModelPartKind::kProjector));
  metrics_->decoder_learning_rate.Set(factor * PeakRate(ModelPartKind::kDecoder));
  metrics_->step_duration.Observe(event.seconds());
  metrics_->last_step_timestamp.Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
}

double RunSession::PeakRate(ModelPartKind part) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].part == part && !rules_[i].frozen) return rules_[i].learning_rate;
  }
  return 0;
}

}  // namespace moonpipe
