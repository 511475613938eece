#include "services/coordinator/run_driver.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "moonpipe/base/fault_point.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/metrics/role_metrics.h"
#include "moonpipe/pipeline/stage_split.h"
#include "moonpipe/spec/flops.h"
#include "moonpipe/spec/flavors.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/tensor_list.h"
#include "moonpipe/train/lr_schedule.h"
#include "moonpipe/train/parameter_groups.h"
#include "services/coordinator/checkpoint_ledger.h"
#include "services/coordinator/edge_traffic.h"
#include "services/coordinator/journal.h"
#include "services/coordinator/plan_builder.h"
#include "services/coordinator/plan_summary.h"
#include "services/coordinator/run_files.h"
#include "services/coordinator/run_step_builder.h"
#include "services/coordinator/step_commit.h"
#include "services/coordinator/worker_pool.h"

namespace moonpipe {

using cluster::v1::Checkpoint;
using cluster::v1::EvalResult;
using cluster::v1::StepEvent;
using cluster::v1::TrainingRun;
using common::v1::WORKER_ROLE_DATALOADER;
using worker::v1::ConnectResponse;
using worker::v1::PublishManifest;
using worker::v1::StepReport;

namespace {

// Message of the error by which Stop ends what is no step.
constexpr char kStopped[] = "stopped on request";
// Steps that a trace keeps.
constexpr size_t kTraceSteps = 3;
// Decoding steps are numbered from here, so that they never meet a training step.
constexpr uint64_t kFirstDecodeStep = uint64_t{1} << 48;

struct Control {
  const char* name;
  bool zero_features;
};
constexpr Control kControls[] = {{"none", false}, {"zero-features", true}, {"swap-pictures", false}};

// Of the wheel that every worker of this build links.
constexpr char kTorchVersion[] = MOONPIPE_TORCH_VERSION;

std::string CpuModel() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (absl::StartsWith(line, "model name")) return std::string(absl::StripAsciiWhitespace(line.substr(line.find(':') + 1)));
  }
  return "unknown";
}

std::string RandomSecret() {
  std::random_device random;
  std::string secret;
  for (int i = 0; i < 8; ++i) absl::StrAppend(&secret, absl::Hex(random(), absl::kZeroPad8));
  return secret;
}

class RunSession {
 public:
  RunSession(const RunDriverOptions& options, const RunRegistry::Job& job)
      : options_(options), job_(job), spec_(job.run.spec()), folder_(job.run.folder()), trace_(kTraceSteps), begin_(absl::Now()) {}

  // The state in which the run ends.
  absl::StatusOr<TrainingRun::State> Drive();
  // Tells every worker to end.
  void Drain(const std::string& reason);

 private:
  absl::Status ReadModel();
  absl::Status ChooseStart();
  absl::Status AwaitWorkers();
  absl::Status CarryOutPlan();
  absl::Status WriteServices() const;
  // OK, or CANCELLED once somebody asked to stop: for waits that no step ends.
  absl::Status CheckStop();
  absl::StatusOr<TrainingRun::State> Train();
  absl::Status TakeStep(uint64_t step);
  absl::StatusOr<PublishManifest> AwaitManifest(uint64_t step);
  void Prepare(uint64_t step);
  absl::Status RunOnWorkers(uint64_t step, const data::v1::StepManifest& manifest, bool decode, bool zero_features);
  // Model FLOPs of the step by worker: the tower's to its owner, the decoder's by what the layers of a stage cost.
  std::map<uint32_t, double> ShareFlops(const data::v1::StepManifest& manifest) const;
  // The first step on a recorded batch leaves what it computed in RUN/observed; where RUN/pinned-routing.safetensors is, it follows
  // the choices of the router in there.
  void ObserveRecorded(worker::v1::RunStep& run) const;
  absl::Status AwaitCommitted(uint64_t step);
  absl::Status Save(uint64_t step);
  absl::Status Evaluate();
  absl::StatusOr<EvalResult> AnswerSet(const cluster::v1::EvalSet& set, const Control& control, bool* pictures_in_pairs);
  absl::Status WriteReport();
  // The peak rate of a part's first tensor that moves; 0 for a frozen part.
  double PeakRate(ModelPartKind part) const;
  Checkpoint ReadyCheckpoint(const CheckpointInfo& info) const;
  void ObserveStep(const StepEvent& event, const data::v1::StepManifest& manifest, double loss_max);

  absl::Time StepDeadline() const { return absl::Now() + absl::Seconds(spec_.runtime().step_timeout_seconds()); }
  bool Computes(const WorkerInfo& worker) const { return worker.registration.role() != WORKER_ROLE_DATALOADER; }
  // Members that compute and are not in `have`.
  template <typename Map>
  std::vector<uint32_t> Missing(const Map& have) const {
    std::vector<uint32_t> missing;
    for (const WorkerInfo& member : pool_->members()) {
      if (Computes(member) && !have.contains(member.id)) missing.push_back(member.id);
    }
    return missing;
  }
  uint32_t Dataloader() const { return plan_.dataloader; }
  void Update(const std::function<void(TrainingRun&)>& change) { options_.runs->Update(job_.id, change); }
  void SetState(TrainingRun::State state) {
    Update([&](TrainingRun& run) { run.set_state(state); });
  }

  const RunDriverOptions options_;
  const RunRegistry::Job job_;
  const cluster::v1::TrainingRunSpec spec_;
  const std::string folder_;

  ModelConfig config_;
  std::vector<TensorSpec> tensors_;
  std::vector<std::string> norm_names_;  // canonical order of the gradient norm
  std::vector<UpdateRule> rules_;        // beside tensors_
  FrozenParts frozen_;
  worker::v1::InitialState initial_;
  data::v1::DataCursor cursor_;  // where the next step begins
  std::unique_ptr<Journal> journal_;
  std::optional<CheckpointLedger> ledger_;
  std::optional<MetricsLog> metrics_log_;
  Trace trace_;
  uint64_t generation_ = 0;
  std::unique_ptr<WorkerPool> pool_;
  ClusterPlan plan_;
  std::optional<CoordinatorMetrics> metrics_;
  double peak_flops_ = 0;

  uint64_t last_step_ = 0;       // committed or skipped
  uint64_t prepared_step_ = 0;
  std::optional<uint64_t> last_saved_;  // step of the newest checkpoint in this run's folder
  bool unacknowledged_ = false;  // the commit of last_step_ is not yet acknowledged by all
  uint64_t next_decode_step_ = kFirstDecodeStep;
  std::vector<EvalResult> evals_;

  const absl::Time begin_;
  absl::Duration training_time_;
  uint64_t tokens_ = 0, images_ = 0;
  double flops_ = 0, step_seconds_ = 0, last_loss_ = 0;
  uint64_t steps_here_ = 0;
};

absl::StatusOr<TrainingRun::State> RunSession::Drive() {
  MOONPIPE_RETURN_IF_ERROR(ReadModel());
  MOONPIPE_RETURN_IF_ERROR(ChooseStart());
  // The report is written last. Without it a run that has taken all its steps still has to be evaluated.
  if (!job_.evaluate_only && last_step_ >= spec_.train().steps() && std::filesystem::exists(folder_ + "/report.json")) {
    MP_LOG(INFO) << "run " << job_.id << " has finished: " << last_step_ << " of " << spec_.train().steps() << " steps are taken";
    return TrainingRun::STATE_SUCCEEDED;
  }
  MOONPIPE_RETURN_IF_ERROR(CarryOutPlan());
  if (job_.evaluate_only) {
    MOONPIPE_RETURN_IF_ERROR(Evaluate());
    return TrainingRun::STATE_SUCCEEDED;
  }
  MOONPIPE_ASSIGN_OR_RETURN(const TrainingRun::State state, Train());
  if (state == TrainingRun::STATE_SUCCEEDED) {
    MOONPIPE_RETURN_IF_ERROR(Evaluate());
    MOONPIPE_RETURN_IF_ERROR(WriteReport());
  }
  return state;
}

absl::Status RunSession::ReadModel() {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) return absl::InternalError(absl::StrCat("cannot create run folder ", folder_, ": ", error.message()));
  MOONPIPE_RETURN_IF_ERROR(WriteFileAtomically(folder_ + "/run.yaml", WriteYaml(spec_)));
  MOONPIPE_ASSIGN_OR_RETURN(config_, ReadModelOf(spec_.model()));
  tensors_ = ListTensors(config_);
  // A group that matches nothing is refused here, before any worker starts.
  MOONPIPE_ASSIGN_OR_RETURN(rules_, AssignUpdateRules(spec_.optimizer(), tensors_, tensors_));
  frozen_ = FrozenParts{true, true, true};
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (rules_[i].frozen) continue;
    norm_names_.push_back(tensors_[i].name);
    switch (tensors_[i].part) {
      case ModelPartKind::kVision:
        frozen_.vision = false;
        break;
      case ModelPartKind::kProjector:
        frozen_.projector = false;
        break;
      case ModelPartKind::kDecoder:
        frozen_.decoder = false;
        break;
    }
  }
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
  const std::string summary = SummarizePlan(plan_, job_.id, spec_, config_, peak_flops_);
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

absl::Status RunSession::CheckStop() {
  if (!options_.runs->TakeWishes(job_.id, last_step_).stop) return absl::OkStatus();
  return absl::CancelledError(kStopped);
}

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
  const StepFlops flops = CountTrainingFlops(config_, manifest, frozen_);
  std::map<uint32_t, double> shares;
  if (plan_.encoder.has_value()) shares[*plan_.encoder] = flops.vision + flops.projector;
  const SplitCosts costs = CostsOf(config_);
  double whole = costs.head;
  for (const double layer : costs.layers) whole += layer;
  double left = flops.decoder;
  for (size_t stage = 0; stage < plan_.stages.size(); ++stage) {
    const PartRange& part = plan_.parts[stage];
    double cost = part.has_head ? costs.head : 0;
    for (int64_t layer = part.first_layer; layer < part.end_layer; ++layer) cost += costs.layers[static_cast<size_t>(layer)];
    // Whole numbers, and the rest for the last stage, so that the shares add up to the step's count exactly.
    const double share = stage + 1 == plan_.stages.size() ? left : std::floor(flops.decoder * cost / whole);
    left -= share;
    shares[plan_.stages[stage]] += share;
    if (part.has_vision) shares[plan_.stages[stage]] += flops.vision + flops.projector;
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
  const StepFlops flops = CountTrainingFlops(config_, manifest, frozen_);
  event.set_model_flops(flops.total());
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
  if (peak_flops_ > 0) event.set_mfu(flops.total() / seconds / peak_flops_);
  ++steps_here_;
  step_seconds_ += seconds;
  tokens_ += event.tokens();
  images_ += event.images();
  flops_ += flops.total();
  last_loss_ = decision.loss;
  event.set_eta_seconds(step_seconds_ / static_cast<double>(steps_here_) * static_cast<double>(spec_.train().steps() - step));
  metrics_log_->Append(event);
  double loss_max = 0;
  for (const auto& [worker, report] : reports) {
    for (const auto& loss : report.losses()) {
      if (loss.trained_labels() > 0) loss_max = std::max(loss_max, loss.loss_sum() / static_cast<double>(loss.trained_labels()));
    }
  }
  ObserveStep(event, manifest, loss_max);
  options_.runs->PublishStep(job_.id, event);
  return absl::OkStatus();
}

absl::Status RunSession::Save(uint64_t step) {
  if (last_saved_ == step) return absl::OkStatus();
  MOONPIPE_RETURN_IF_ERROR(AwaitCommitted(step));
  const absl::Time begin = absl::Now();
  absl::Time written = begin;
  Checkpoint checkpoint;
  checkpoint.set_name(absl::StrFormat("%s/checkpoints/step-%08d", job_.run.name(), step));
  checkpoint.set_step(step);
  checkpoint.set_state(Checkpoint::STATE_SAVING);
  options_.runs->PutCheckpoint(job_.id, checkpoint);
  auto write = [&]() -> absl::StatusOr<CheckpointInfo> {
    MOONPIPE_ASSIGN_OR_RETURN(const std::string writing, ledger_->Begin(step));
    // Numbered by place, not by the order in which workers registered: the same state gives the same files.
    const std::vector<uint32_t> writers = plan_.ScheduleWorkers();
    uint32_t shard = 0;
    for (const uint32_t worker : writers) {
      ConnectResponse command;
      worker::v1::SaveShards& save = *command.mutable_save_shards();
      save.set_generation(generation_);
      save.set_step(step);
      save.set_folder(writing);
      save.set_shard(++shard);
      save.set_shards(static_cast<uint32_t>(writers.size()));
      pool_->Send(worker, std::move(command));
    }
    MOONPIPE_RETURN_IF_ERROR(pool_->Await(
        absl::StrCat("the workers wrote the checkpoint of step ", step),
        absl::Now() + absl::Seconds(spec_.runtime().save_timeout_seconds()), [&] { return Missing(pool_->saved[step]).empty(); },
        [&] { return Missing(pool_->saved[step]); }));
    written = absl::Now();
    CheckpointContent content;
    for (const auto& [worker, saved] : pool_->saved[step]) {
      if (!saved.error().empty()) {
        return absl::InternalError(absl::StrCat(pool_->NameOf(worker), " could not write its shard: ", saved.error()));
      }
      content.shards.insert(content.shards.end(), saved.files().begin(), saved.files().end());
    }
    pool_->saved.erase(step);
    content.config_json = config_.json;
    for (const char* name : {"tiktoken.model", "tokenizer_config.json"}) {
      if (spec_.data().tokenizer().empty()) break;  // trained on recorded batches
      content.tokenizer_files.push_back(absl::StrCat(spec_.data().tokenizer(), "/", name));
    }
    content.manifest.cursor = cursor_;
    content.manifest.seed = spec_.train().seed();
    content.manifest.spec = spec_;
    content.manifest.compute_threads = spec_.runtime().compute_threads();
    content.manifest.cpu_model = CpuModel();
    content.manifest.torch_version = kTorchVersion;
    content.manifest.ready_time = absl::Now();
    MOONPIPE_ASSIGN_OR_RETURN(CheckpointInfo info, ledger_->Finish(step, content));
    MOONPIPE_ASSIGN_OR_RETURN(const std::vector<std::string> removed, ledger_->Retain(spec_.checkpoint().keep_last(), step));
    for (const std::string& path : removed) {
      MP_LOG(INFO) << "checkpoint " << path << " is removed: " << step << " is newer";
      options_.runs->ForgetCheckpoint(
          job_.id, absl::StrCat(job_.run.name(), "/checkpoints/", std::filesystem::path(path).filename().string()));
    }
    return info;
  };
  const absl::StatusOr<CheckpointInfo> saved = write();
  if (!saved.ok()) {
    checkpoint.set_state(Checkpoint::STATE_FAILED);
    checkpoint.set_error(std::string(saved.status().message()));
    options_.runs->PutCheckpoint(job_.id, checkpoint);
    return saved.status();
  }
  last_saved_ = step;
  options_.runs->PutCheckpoint(job_.id, ReadyCheckpoint(*saved));
  metrics_->checkpoint_write_duration.Observe(absl::ToDoubleSeconds(written - begin));
  metrics_->checkpoint_commit_duration.Observe(absl::ToDoubleSeconds(absl::Now() - written));
  metrics_->checkpoint_last_success_timestamp.Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  metrics_->checkpoint_bytes.Add(static_cast<double>(saved->size_bytes));
  MP_LOG(INFO) << "checkpoint of step " << step << " is in " << saved->path;
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

absl::StatusOr<EvalResult> RunSession::AnswerSet(const cluster::v1::EvalSet& set, const Control& control, bool* pictures_in_pairs) {
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
    for (const Control& control : kControls) {
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

Checkpoint RunSession::ReadyCheckpoint(const CheckpointInfo& info) const {
  Checkpoint checkpoint;
  checkpoint.set_name(absl::StrCat(job_.run.name(), "/checkpoints/", CheckpointLedger::NameOf(info.step)));
  checkpoint.set_step(info.step);
  checkpoint.set_state(Checkpoint::STATE_READY);
  checkpoint.set_path(info.path);
  checkpoint.set_size_bytes(info.size_bytes);
  checkpoint.set_manifest_sha256(info.manifest_sha256);
  checkpoint.mutable_ready_time()->set_seconds(absl::ToUnixSeconds(info.manifest.ready_time));
  return checkpoint;
}

double RunSession::PeakRate(ModelPartKind part) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].part == part && !rules_[i].frozen) return rules_[i].learning_rate;
  }
  return 0;
}

void RunSession::Drain(const std::string& reason) {
  ConnectResponse command;
  command.mutable_drain()->set_reason(reason);
  for (const WorkerInfo& worker : options_.hub->Workers()) (void)options_.hub->Send(worker.id, command);
}

}  // namespace

void DriveRun(const RunDriverOptions& options, const RunRegistry::Job& job) {
  RunSession session(options, job);
  const absl::StatusOr<TrainingRun::State> end = session.Drive();
  session.Drain(end.ok() ? "the run has ended" : "the run has failed");
  options.runs->Update(job.id, [&](TrainingRun& run) {
    if (end.ok()) {
      run.set_state(*end);
    } else if (absl::IsCancelled(end.status()) && end.status().message() == kStopped) {
      // Nothing was in progress that a checkpoint would have to keep.
      run.set_state(TrainingRun::STATE_STOPPED);
    } else {
      run.set_state(TrainingRun::STATE_FAILED);
      run.set_error(std::string(end.status().message()));
    }
  });
  if (!end.ok() && end.status().message() != kStopped) {
    MP_LOG(ERROR) << "run " << job.id << " failed: " << end.status().message()
                  << "; start it again with --resume auto to go on from its last checkpoint";
  }
}

}  // namespace moonpipe
