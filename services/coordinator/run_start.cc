#include "services/coordinator/run_session.h"

#include <filesystem>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/spec/flavors.h"
#include "moonpipe/train/lr_schedule.h"
#include "services/coordinator/machine.h"
#include "services/coordinator/plan_summary.h"

namespace moonpipe {

using cluster::v1::TrainingRun;
using worker::v1::ConnectResponse;

namespace {

std::string RandomSecret() {
  std::random_device random;
  std::string secret;
  for (int i = 0; i < 8; ++i) absl::StrAppend(&secret, absl::Hex(random(), absl::kZeroPad8));
  return secret;
}

}  // namespace

absl::Status RunSession::ReadModel() {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) return absl::InternalError(absl::StrCat("cannot create run folder ", folder_, ": ", error.message()));
  MOONPIPE_RETURN_IF_ERROR(WriteFileAtomically(folder_ + "/run.yaml", WriteYaml(spec_)));
  MOONPIPE_ASSIGN_OR_RETURN(config_, ReadModelOf(spec_.model()));
  tensors_ = ListTensors(config_);
  // A group that matches nothing is refused here, before any worker starts.
  MOONPIPE_ASSIGN_OR_RETURN(rules_, AssignUpdateRules(spec_.optimizer(), tensors_, tensors_));
  std::vector<bool> moves;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    moves.push_back(!rules_[i].frozen);
    if (moves.back()) norm_names_.push_back(tensors_[i].name);
  }
  frozen_ = FindFrozenParts(config_, tensors_, moves);
  return CheckLearningRateSchedule(spec_.optimizer().schedule(), spec_.train().steps());
}

absl::Status RunSession::ChooseStart() {
  // The journal first: it is locked while a coordinator drives the run, and the ledger removes what an interrupted save left.
  const std::string journal = folder_ + "/journal.jsonl";
  MOONPIPE_ASSIGN_OR_RETURN(journal_, Journal::Open(journal));
  if (spec_.checkpoint().resume() == "never" && !journal_->entries().empty()) {
    // What was done before does not bind a run that begins afresh.
    std::error_code error;
    std::filesystem::rename(journal, folder_ + "/journal-before.jsonl", error);
    if (error) return absl::InternalError(absl::StrCat("cannot move ", journal, " aside: ", error.message()));
    MOONPIPE_ASSIGN_OR_RETURN(journal_, Journal::Open(journal));
  }
  MOONPIPE_ASSIGN_OR_RETURN(CheckpointLedger ledger, CheckpointLedger::Open(folder_));
  ledger_.emplace(std::move(ledger));
  metrics_log_.emplace(folder_ + "/metrics.jsonl");
  MOONPIPE_ASSIGN_OR_RETURN(const ResumeChoice choice, ledger_->ChooseResume(spec_.checkpoint().resume()));
  MP_LOG(INFO) << choice.reason;
  MOONPIPE_ASSIGN_OR_RETURN(const CheckpointList found, ledger_->List());
  for (const CheckpointInfo& info : found.complete) {
    options_.runs->PutCheckpoint(job_.id, ReadyCheckpoint(info));
    if (choice.checkpoint.has_value() && info.path == choice.checkpoint->path) last_saved_ = info.step;
  }
  if (choice.checkpoint.has_value()) {
    const CheckpointManifest& manifest = choice.checkpoint->manifest;
    initial_.set_path(choice.checkpoint->path);
    initial_.set_has_optimizer_state(true);
    initial_.set_step(manifest.step);
    cursor_ = manifest.cursor;
    last_step_ = prepared_step_ = manifest.step;
    for (const std::string& difference :
         DifferencesThatChangeBits(manifest, spec_.runtime().compute_threads(), CpuModel(), kTorchVersion)) {
      MP_LOG(WARNING) << difference;
    }
    Update([&](TrainingRun& run) { run.set_step(manifest.step); });
  } else if (spec_.model().has_path()) {
    initial_.set_path(spec_.model().path());
  }
  if (const JournalEntry* last = journal_->Find(last_step_); last != nullptr) last_loss_ = last->loss;
  return absl::OkStatus();
}

absl::Status RunSession::AwaitWorkers() {
  const absl::Time deadline = absl::Now() + absl::Seconds(spec_.runtime().start_timeout_seconds());
  PlanInputs inputs;
  inputs.generation = generation_ = ++*options_.generation;
  inputs.run = job_.id;
  inputs.spec = spec_;
  inputs.model = config_;
  inputs.initial_state = initial_;
  inputs.cursor = cursor_;
  inputs.secret = RandomSecret();
  while (true) {
    inputs.workers.clear();
    const std::vector<WorkerInfo> workers = options_.hub->Workers();
    for (const WorkerInfo& worker : workers) inputs.workers.push_back({worker.id, worker.registration});
    absl::StatusOr<ClusterPlan> plan = BuildPlan(inputs);
    if (plan.ok()) {
      plan_ = *std::move(plan);
      std::vector<WorkerInfo> members;
      for (const WorkerInfo& worker : workers) {
        if (plan_.plans.contains(worker.id)) members.push_back(worker);
      }
      WorkerPool::Options pool;
      pool.generation = generation_;
      pool.heartbeat_timeout = absl::Seconds(spec_.runtime().heartbeat_timeout_seconds());
      for (const auto& [worker, one] : plan_.plans) {
        for (const worker::v1::EdgePlan& edge : one.edges()) pool.edges[worker].push_back(edge.name());
      }
      pool_ = std::make_unique<WorkerPool>(options_.hub, std::move(members), pool);
      return absl::OkStatus();
    }
    if (!absl::IsUnavailable(plan.status())) return plan.status();
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("no plan after ", spec_.runtime().start_timeout_seconds(), " s: ",
                                                      plan.status().message(), "; start what is missing with --coordinator"));
    }
    MOONPIPE_RETURN_IF_ERROR(CheckStop());
    // The event only says that something has changed.
    (void)options_.hub->Next(std::min(deadline, absl::Now() + absl::Milliseconds(200)));
  }
}

absl::Status RunSession::WriteServices() const {
  std::vector<ServiceEntry> services = {options_.self};
  auto add = [&](const std::string& role, uint32_t ordinal, uint32_t worker) {
    const std::string name = role == "decoder-stage" ? absl::StrCat(role, "-", ordinal) : role;
    for (const WorkerInfo& member : pool_->members()) {
      if (member.id != worker) continue;
      const worker::v1::Register& registration = member.registration;
      services.push_back({name, role, ordinal, registration.address(), registration.metrics_address(), registration.host(), registration.process_id()});
    }
  };
  add("dataloader", 0, plan_.dataloader);
  if (plan_.encoder.has_value()) add("vision-encoder", 0, *plan_.encoder);
  for (uint32_t stage = 0; stage < plan_.stages.size(); ++stage) add("decoder-stage", stage, plan_.stages[stage]);
  return WriteFileAtomically(folder_ + "/services.json", ServicesJson(services));
}

absl::Status RunSession::CarryOutPlan() {
  MOONPIPE_RETURN_IF_ERROR(AwaitWorkers());
  MOONPIPE_RETURN_IF_ERROR(WriteServices());
  options_.hub->BeginGeneration(generation_);
  SetState(TrainingRun::STATE_STARTING);
  for (const auto& [worker, plan] : plan_.plans) {
    ConnectResponse command;
    *command.mutable_plan() = plan;
    pool_->Send(worker, std::move(command));
  }
  for (const WorkerInfo& member : pool_->members()) {
    if (!Computes(member)) continue;
    const double peak = member.registration.peak_flops_per_second();
    // One unknown device makes the sum unknown.
    peak_flops_ = peak <= 0 || peak_flops_ < 0 ? -1 : peak_flops_ + peak;
  }
  MOONPIPE_ASSIGN_OR_RETURN(const std::string summary, SummarizePlan(plan_, job_.id, spec_, config_, rules_, peak_flops_));
  Update([&](TrainingRun& run) { run.set_plan_summary(summary); });
  MOONPIPE_RETURN_IF_ERROR(pool_->Await(
      "the workers carried out the plan", absl::Now() + absl::Seconds(spec_.runtime().start_timeout_seconds()),
      [&] { return pool_->ready.size() == pool_->members().size(); },
      [&] {
        std::vector<uint32_t> missing;
        for (const WorkerInfo& member : pool_->members()) {
          if (!pool_->ready.contains(member.id)) missing.push_back(member.id);
        }
        return missing;
      }));
  metrics_.emplace(options_.metrics, job_.id);
  // A counter begins at 0 with its process; steps of the run stay steps of the run.
  metrics_->steps.Add(static_cast<double>(last_step_));
  for (size_t stage = 0; stage < plan_.stages.size(); ++stage) metrics_->stage_restarts(absl::StrCat(stage), "restarted");
  metrics_->target_steps.Set(static_cast<double>(spec_.train().steps()));
  return absl::OkStatus();
}

}  // namespace moonpipe
