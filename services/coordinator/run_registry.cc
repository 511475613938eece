#include "services/coordinator/run_registry.h"

#include <algorithm>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "google/protobuf/util/message_differencer.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/runtime/rpc_error.h"

namespace moonpipe {

using cluster::v1::Checkpoint;
using cluster::v1::StepEvent;
using cluster::v1::TrainingRun;
using cluster::v1::WatchTrainingRunResponse;

namespace {

constexpr absl::string_view kPrefix = "trainingRuns/";

std::string StateName(TrainingRun::State state) {
  return std::string(absl::StripPrefix(TrainingRun::State_Name(state), "STATE_"));
}

std::string RandomUid() {
  std::random_device random;
  return absl::StrFormat("%08x-%04x-4%03x-a%03x-%08x%04x", random(), random() & 0xffff, random() & 0xfff, random() & 0xfff,
                         random(), random() & 0xffff);
}

absl::Status CheckpointNotFound(const std::string& name) {
  return WithResourceInfo(RpcError(absl::StatusCode::kNotFound,
                                   absl::StrCat("there is no checkpoint '", name, "'; ListCheckpoints tells those there are"),
                                   "CHECKPOINT_NOT_FOUND", {{"name", name}}),
                          "moonpipe.dev/Checkpoint", name, "it does not exist, or was removed for newer ones");
}

}  // namespace

bool HasEnded(TrainingRun::State state) {
  return state == TrainingRun::STATE_STOPPED || state == TrainingRun::STATE_SUCCEEDED || state == TrainingRun::STATE_FAILED;
}

absl::Status CheckCommand(TrainingRun::State state, RunCommand command, bool pausing) {
  bool allowed = false;
  const char* word = "";
  switch (command) {
    case RunCommand::kPause:
      word = "paused";
      allowed = state == TrainingRun::STATE_RUNNING;
      break;
    case RunCommand::kResume:
      word = "resumed";
      allowed = state == TrainingRun::STATE_PAUSED || (pausing && !HasEnded(state));
      break;
    case RunCommand::kStop:
      word = "stopped";
      allowed = !HasEnded(state);
      break;
    case RunCommand::kSave:
      word = "saved";
      allowed = state == TrainingRun::STATE_RUNNING || state == TrainingRun::STATE_PAUSED;
      break;
  }
  if (allowed) return absl::OkStatus();
  return RpcError(absl::StatusCode::kFailedPrecondition, absl::StrCat("a run that is ", StateName(state), " cannot be ", word),
                  "WRONG_STATE", {{"state", StateName(state)}, {"command", word}});
}

absl::StatusOr<RunRegistry::Run*> RunRegistry::FindLocked(const std::string& name) {
  auto run = runs_.find(std::string(absl::StripPrefix(name, kPrefix)));
  if (!absl::StartsWith(name, kPrefix) || run == runs_.end()) {
    return WithResourceInfo(RpcError(absl::StatusCode::kNotFound,
                                     absl::StrCat("there is no run '", name, "'; ListTrainingRuns tells those there are"),
                                     "RUN_NOT_FOUND", {{"name", name}}),
                            "moonpipe.dev/TrainingRun", name, "it does not exist on this coordinator");
  }
  return &run->second;
}

absl::StatusOr<const RunRegistry::Run*> RunRegistry::FindLocked(const std::string& name) const {
  return const_cast<RunRegistry*>(this)->FindLocked(name);
}

void RunRegistry::TouchLocked(Run& run) {
  run.message.set_etag(absl::StrCat("v", ++run.version));
}

void RunRegistry::Notify() {
  absl::MutexLock lock(&listeners_mutex_);
  for (auto& [handle, listener] : listeners_) listener();
}

absl::StatusOr<TrainingRun> RunRegistry::Create(const std::string& id, const cluster::v1::TrainingRunSpec& spec,
                                                const std::string& request_id, bool evaluate_only, bool validate_only) {
  absl::MutexLock lock(&mutex_);
  const std::string name = absl::StrCat(kPrefix, id);
  if (auto existing = runs_.find(id); existing != runs_.end()) {
    const bool repeated = !request_id.empty() && existing->second.request_id == request_id;
    if (repeated && existing->second.evaluate_only == evaluate_only &&
        google::protobuf::util::MessageDifferencer::Equals(existing->second.spec, spec)) {
      return existing->second.message;
    }
    const std::string message = repeated ? absl::StrCat("request_id ", request_id, " created run '", id, "' from another spec")
                                         : absl::StrCat("there is a run '", id, "' already; choose another training_run_id");
    return WithResourceInfo(RpcError(absl::StatusCode::kAlreadyExists, message, repeated ? "REQUEST_ID_REUSED" : "RUN_ALREADY_EXISTS",
                                     {{"training_run_id", id}, {"request_id", request_id}}),
                            "moonpipe.dev/TrainingRun", name, "it exists already");
  }
  for (const auto& [other, run] : runs_) {
    if (!HasEnded(run.message.state())) {
      const std::string state = StateName(run.message.state());
      const std::string todo = "stop it before starting another";
      return WithPreconditionFailure(RpcError(absl::StatusCode::kFailedPrecondition,
                                              absl::StrCat("run '", other, "' is ", state, "; ", todo), "ANOTHER_RUN_ACTIVE",
                                              {{"active_run", other}, {"state", state}}),
                                     "RUN_ACTIVE", run.message.name(), todo);
    }
  }
  Run run;
  run.request_id = request_id;
  run.spec = spec;
  run.evaluate_only = evaluate_only;
  run.message.set_name(name);
  *run.message.mutable_spec() = spec;
  if (validate_only) return run.message;
  run.message.set_uid(RandomUid());
  run.message.set_state(TrainingRun::STATE_PENDING);
  run.message.set_folder(absl::StrCat(runs_folder_, "/", id));
  run.message.mutable_create_time()->set_seconds(absl::ToUnixSeconds(absl::Now()));
  TouchLocked(run);
  order_.push_back(id);
  return runs_.emplace(id, std::move(run)).first->second.message;
}

absl::StatusOr<TrainingRun> RunRegistry::Get(const std::string& name) const {
  absl::MutexLock lock(&mutex_);
  MOONPIPE_ASSIGN_OR_RETURN(const Run* run, FindLocked(name));
  return run->message;
}

std::vector<TrainingRun> RunRegistry::List() const {
  absl::MutexLock lock(&mutex_);
  std::vector<TrainingRun> runs;
  for (auto id = order_.rbegin(); id != order_.rend(); ++id) runs.push_back(runs_.at(*id).message);
  return runs;
}

absl::StatusOr<TrainingRun> RunRegistry::Command(const std::string& name, RunCommand command, const std::string& etag) {
  TrainingRun message;
  {
    absl::MutexLock lock(&mutex_);
    MOONPIPE_ASSIGN_OR_RETURN(Run * run, FindLocked(name));
    if (!etag.empty() && etag != run->message.etag()) {
      return RpcError(absl::StatusCode::kAborted,
                      absl::StrCat("etag ", etag, " is stale; the run's is ", run->message.etag(), ": read the run again"),
                      "STALE_ETAG", {{"etag", etag}, {"current_etag", run->message.etag()}});
    }
    if (absl::Status checked = CheckCommand(run->message.state(), command, run->pause); !checked.ok()) {
      return WithPreconditionFailure(std::move(checked), "RUN_STATE", name, "GetTrainingRun tells the state");
    }
    switch (command) {
      case RunCommand::kPause:
        run->pause = true;
        break;
      case RunCommand::kResume:
        run->pause = false;
        break;
      case RunCommand::kStop:
        run->stop = true;
        break;
      case RunCommand::kSave:
        run->save_step = run->message.step();
        break;
    }
    TouchLocked(*run);
    message = run->message;
  }
  return message;
}

absl::StatusOr<Checkpoint> RunRegistry::RequestSave(const std::string& run_name, const std::string& request_id) {
  absl::MutexLock lock(&mutex_);
  MOONPIPE_ASSIGN_OR_RETURN(Run * run, FindLocked(run_name));
  if (auto seen = run->save_requests.find(request_id); !request_id.empty() && seen != run->save_requests.end()) {
    auto checkpoint = run->checkpoints.find(seen->second);
    if (checkpoint == run->checkpoints.end()) return CheckpointNotFound(seen->second);
    return checkpoint->second;
  }
  if (absl::Status checked = CheckCommand(run->message.state(), RunCommand::kSave); !checked.ok()) {
    return WithPreconditionFailure(std::move(checked), "RUN_STATE", run_name, "GetTrainingRun tells the state");
  }
  // The run's thread saves between two steps: after the step in progress, or now when it is paused or at its last step.
  uint64_t step = run->message.step();
  if (run->message.state() == TrainingRun::STATE_RUNNING && step < run->spec.train().steps()) ++step;
  const std::string name = absl::StrFormat("%s/checkpoints/step-%08d", run->message.name(), step);
  if (!request_id.empty()) run->save_requests[request_id] = name;
  Checkpoint& checkpoint = run->checkpoints[name];
  if (checkpoint.state() == Checkpoint::STATE_READY || checkpoint.state() == Checkpoint::STATE_SAVING) return checkpoint;
  run->save_step = step;
  checkpoint.Clear();
  checkpoint.set_name(name);
  checkpoint.set_step(step);
  checkpoint.set_state(Checkpoint::STATE_SAVING);
  return checkpoint;
}

absl::StatusOr<Checkpoint> RunRegistry::GetCheckpoint(const std::string& name) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, run] : runs_) {
    if (auto checkpoint = run.checkpoints.find(name); checkpoint != run.checkpoints.end()) return checkpoint->second;
  }
  return CheckpointNotFound(name);
}

absl::StatusOr<std::vector<Checkpoint>> RunRegistry::ListCheckpoints(const std::string& run_name) const {
  absl::MutexLock lock(&mutex_);
  MOONPIPE_ASSIGN_OR_RETURN(const Run* run, FindLocked(run_name));
  std::vector<Checkpoint> checkpoints;
  for (auto entry = run->checkpoints.rbegin(); entry != run->checkpoints.rend(); ++entry) checkpoints.push_back(entry->second);
  return checkpoints;
}

absl::StatusOr<RunRegistry::Progress> RunRegistry::EventAt(const std::string& name, size_t next) const {
  absl::MutexLock lock(&mutex_);
  MOONPIPE_ASSIGN_OR_RETURN(const Run* run, FindLocked(name));
  Progress progress;
  if (next < run->events.size()) {
    progress.event = run->events[next];
  } else {
    progress.ended = HasEnded(run->message.state());
  }
  return progress;
}

uint64_t RunRegistry::AddListener(std::function<void()> listener) {
  absl::MutexLock lock(&listeners_mutex_);
  listeners_[++last_listener_] = std::move(listener);
  return last_listener_;
}

void RunRegistry::RemoveListener(uint64_t handle) {
  absl::MutexLock lock(&listeners_mutex_);
  listeners_.erase(handle);
}

absl::StatusOr<RunRegistry::Job> RunRegistry::WaitForJob(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  std::string found;
  auto waiting = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const std::string& id : order_) {
      if (!runs_.at(id).started) {
        found = id;
        return true;
      }
    }
    return false;
  };
  if (!mutex_.AwaitWithDeadline(absl::Condition(&waiting), deadline)) return absl::DeadlineExceededError("no run waits");
  Run& run = runs_.at(found);
  run.started = true;
  return Job{found, run.message, run.evaluate_only};
}

void RunRegistry::Update(const std::string& id, const std::function<void(TrainingRun&)>& change) {
  {
    absl::MutexLock lock(&mutex_);
    Run& run = runs_.at(id);
    change(run.message);
    if (HasEnded(run.message.state())) {
      for (auto& [name, checkpoint] : run.checkpoints) {
        if (checkpoint.state() != Checkpoint::STATE_SAVING) continue;
        checkpoint.set_state(Checkpoint::STATE_FAILED);
        checkpoint.set_error(absl::StrCat("the run ended before it was written",
                                          run.message.error().empty() ? "" : absl::StrCat(": ", run.message.error())));
      }
    }
    TouchLocked(run);
    auto event = std::make_shared<WatchTrainingRunResponse>();
    *event->mutable_training_run() = run.message;
    run.events.push_back(std::move(event));
  }
  Notify();
}

void RunRegistry::PublishStep(const std::string& id, const StepEvent& step) {
  {
    absl::MutexLock lock(&mutex_);
    Run& run = runs_.at(id);
    run.message.set_step(step.step());
    TouchLocked(run);
    auto event = std::make_shared<WatchTrainingRunResponse>();
    *event->mutable_step() = step;
    run.events.push_back(std::move(event));
  }
  Notify();
}

void RunRegistry::PutCheckpoint(const std::string& id, const Checkpoint& checkpoint) {
  absl::MutexLock lock(&mutex_);
  runs_.at(id).checkpoints[checkpoint.name()] = checkpoint;
}

void RunRegistry::ForgetCheckpoint(const std::string& id, const std::string& name) {
  absl::MutexLock lock(&mutex_);
  runs_.at(id).checkpoints.erase(name);
}

RunRegistry::Wishes RunRegistry::TakeWishes(const std::string& id, uint64_t step) {
  absl::MutexLock lock(&mutex_);
  Run& run = runs_.at(id);
  if (run.save_step.has_value() && *run.save_step > step) return {};
  const Wishes wishes{run.pause, run.stop, run.save_step.has_value()};
  run.save_step.reset();
  return wishes;
}

void RunRegistry::WaitWhilePaused(const std::string& id, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  Run& run = runs_.at(id);
  auto changed = [&]() { return !run.pause || run.stop || run.save_step.has_value(); };
  mutex_.AwaitWithDeadline(absl::Condition(&changed), deadline);
}

}  // namespace moonpipe
