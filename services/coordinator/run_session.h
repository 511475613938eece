// One run, from its workers' registration to its report: the state that its phases share. Each phase has a file of its own:
//   run_start.cc        model, resume choice, plan, until every worker is ready
//   run_training.cc     the steps
//   run_checkpoints.cc  what is written
//   run_evaluation.cc   held-out sets and the report
// One thread, in straight lines; every decision is made by a pure function (plan_builder, step_commit, lr_schedule,
// checkpoint_ledger) and every wait goes through the pool and has a deadline.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "moonpipe/metrics/role_metrics.h"
#include "moonpipe/spec/flops.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/tensor_list.h"
#include "moonpipe/train/parameter_groups.h"
#include "services/coordinator/checkpoint_ledger.h"
#include "services/coordinator/journal.h"
#include "services/coordinator/plan_builder.h"
#include "services/coordinator/run_driver.h"
#include "services/coordinator/run_files.h"
#include "services/coordinator/run_registry.h"
#include "services/coordinator/tensorboard.h"
#include "services/coordinator/worker_pool.h"

namespace moonpipe {

// Message of the error by which Stop ends what is no step.
inline constexpr char kStopped[] = "stopped on request";
// Decoding steps are numbered from here, so that they never meet a training step.
inline constexpr uint64_t kFirstDecodeStep = uint64_t{1} << 48;

// What the model is shown instead of the pictures while a set is answered.
struct EvalControl {
  const char* name;
  bool zero_features;
};

class RunSession {
 public:
  RunSession(const RunDriverOptions& options, const RunRegistry::Job& job)
      : options_(options), job_(job), spec_(job.run.spec()), folder_(job.run.folder()), begin_(absl::Now()) {}

  // The state in which the run ends.
  absl::StatusOr<cluster::v1::TrainingRun::State> Drive();
  // Tells every worker to end.
  void Drain(const std::string& reason);

 private:
  // OK, or CANCELLED once somebody asked to stop: for waits that no step ends.
  absl::Status CheckStop();

  // run_start.cc
  absl::Status ReadModel();
  absl::Status ChooseStart();
  absl::Status AwaitWorkers();
  absl::Status CarryOutPlan();
  absl::Status WriteServices() const;

  // run_training.cc
  absl::StatusOr<cluster::v1::TrainingRun::State> Train();
  absl::Status TakeStep(uint64_t step);
  void Prepare(uint64_t step);
  absl::StatusOr<worker::v1::PublishManifest> AwaitManifest(uint64_t step);
  absl::Status RunOnWorkers(uint64_t step, const data::v1::StepManifest& manifest, bool decode, bool zero_features);
  // Model FLOPs of the step by worker: the tower's to its owner, the decoder's by what the layers of a stage cost.
  std::map<uint32_t, double> ShareFlops(const data::v1::StepManifest& manifest) const;
  // The first step on a recorded batch leaves what it computed in RUN/observed; where RUN/pinned-routing.safetensors is, it follows
  // the choices of the router in there.
  void ObserveRecorded(worker::v1::RunStep& run) const;
  absl::Status AwaitCommitted(uint64_t step);
  void ObserveStep(const cluster::v1::StepEvent& event, const data::v1::StepManifest& manifest, double loss_max);
  // The peak rate of a part's first tensor that moves; 0 for a frozen part.
  double PeakRate(ModelPartKind part) const;

  // run_checkpoints.cc
  absl::Status Save(uint64_t step);
  absl::StatusOr<CheckpointInfo> WriteCheckpoint(uint64_t step, absl::Time* shards_written);
  cluster::v1::Checkpoint ReadyCheckpoint(const CheckpointInfo& info) const;

  // run_evaluation.cc
  absl::Status Evaluate();
  absl::StatusOr<cluster::v1::EvalResult> AnswerSet(const cluster::v1::EvalSet& set, const EvalControl& control,
                                                    bool* pictures_in_pairs);
  absl::Status WriteReport();

  absl::Time StepDeadline() const { return absl::Now() + absl::Seconds(spec_.runtime().step_timeout_seconds()); }
  bool Computes(const WorkerInfo& worker) const { return worker.registration.role() != common::v1::WORKER_ROLE_DATALOADER; }
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
  void Update(const std::function<void(cluster::v1::TrainingRun&)>& change) { options_.runs->Update(job_.id, change); }
  void SetState(cluster::v1::TrainingRun::State state) {
    Update([&](cluster::v1::TrainingRun& run) { run.set_state(state); });
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
  std::optional<TensorBoardLog> tensorboard_;
  Trace trace_{3};  // the last steps
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
  std::vector<cluster::v1::EvalResult> evals_;

  const absl::Time begin_;
  absl::Duration training_time_;
  uint64_t tokens_ = 0, images_ = 0;
  double flops_ = 0, step_seconds_ = 0, last_loss_ = 0;
  uint64_t steps_here_ = 0;
};

}  // namespace moonpipe
