#include "services/coordinator/run_driver.h"

#include <filesystem>

#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "services/coordinator/run_session.h"

namespace moonpipe {

using cluster::v1::TrainingRun;
using worker::v1::ConnectResponse;

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

absl::Status RunSession::CheckStop() {
  if (!options_.runs->TakeWishes(job_.id, last_step_).stop) return absl::OkStatus();
  return absl::CancelledError(kStopped);
}

void RunSession::Drain(const std::string& reason) {
  ConnectResponse command;
  command.mutable_drain()->set_reason(reason);
  for (const WorkerInfo& worker : options_.hub->Workers()) (void)options_.hub->Send(worker.id, command);
}

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
