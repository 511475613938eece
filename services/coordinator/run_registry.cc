#include "services/coordinator/run_registry.h"

#include <algorithm>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "moonpipe/base/status_macros.h"

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

}  // namespace

bool HasEnded(TrainingRun::State state) {
  return state == TrainingRun::STATE_STOPPED || state == TrainingRun::STATE_SUCCEEDED || state == TrainingRun::STATE_FAILED;
}

absl::Status CheckCommand(TrainingRun::State state, RunCommand command) {
  bool allowed = false;
  const char* word = "";
  switch (command) {
    case RunCommand::kPause:
      word = "paused";
      allowed = state == TrainingRun::STATE_RUNNING;
      break;
    case RunCommand::kResume:
      word = "resumed";
      allowed = state == TrainingRun::STATE_PAUSED;
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
  return absl::FailedPreconditionError(absl::StrCat("a run that is ", StateName(state), " cannot be ", word));
}

absl::StatusOr<RunRegistry::Run*> RunRegistry::FindLocked(const std::string& name) {
  auto run = runs_.find(std::string(absl::StripPrefix(name, kPrefix)));
  if (!absl::StartsWith(name, kPrefix) || run == runs_.end()) {
    return absl::NotFoundError(absl::StrCat("there is no run '", name, "'; ListTrainingRuns tells those there are"));
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
                                                const std::string& request_id, bool evaluate_only) {
  absl::MutexLock lock(&mutex_);
  if (auto existing = runs_.find(id); existing != runs_.end()) {
    if (!request_id.empty() && existing->second.request_id == request_id) return existing->second.message;
    return absl::AlreadyExistsError(absl::StrCat("there is a run '", id, "' already"));
  }
  for (const auto& [other, run] : runs_) {
    if (!HasEnded(run.message.state())) {
      return absl::FailedPreconditionError(
          absl::StrCat("run '", other, "' is ", StateName(run.message.state()), "; stop it before starting another"));
    }
  }
  Run run;
  run.request_id = request_id;
  run.evaluate_only = evaluate_only;
  run.message.set_name(absl::StrCat(kPrefix, id));
  run.message.set_uid(RandomUid());
  *run.message.mutable_spec() = spec;
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
      return absl::AbortedError(
          absl::StrCat("etag ", etag, " is stale; the run's is ", run->message.etag(), ": read the run again"));
    }
    MOONPIPE_RETURN_IF_ERROR(CheckCommand(run->message.state(), command));
    switch (command) {
      case RunCommand::kPause:
        run->wishes.pause = true;
        break;
      case RunCommand::kResume:
        run->wishes.pause = false;
        break;
      case RunCommand::kStop:
        run->wishes.stop = true;
        break;
      case RunCommand::kSave:
        run->wishes.save = true;
        break;
    }
    TouchLocked(*run);
    message = run->message;
  }
  return message;
}

absl::StatusOr<Checkpoint> RunRegistry::RequestSave(const std::string& run_name) {
  absl::MutexLock lock(&mutex_);
  MOONPIPE_ASSIGN_OR_RETURN(Run * run, FindLocked(run_name));
  MOONPIPE_RETURN_IF_ERROR(CheckCommand(run->message.state(), RunCommand::kSave));
  // The run's thread saves at the next boundary between steps: after the step in progress, or now when it is paused.
  const uint64_t step = run->message.step() + (run->message.state() == TrainingRun::STATE_PAUSED ? 0 : 1);
  run->wishes.save = true;
  Checkpoint checkpoint;
  checkpoint.set_name(absl::StrFormat("%s/checkpoints/step-%08d", run->message.name(), step));
  checkpoint.set_step(step);
  checkpoint.set_state(Checkpoint::STATE_SAVING);
  auto [existing, created] = run->checkpoints.emplace(checkpoint.name(), checkpoint);
  return existing->second;
}

absl::StatusOr<Checkpoint> RunRegistry::GetCheckpoint(const std::string& name) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, run] : runs_) {
    if (auto checkpoint = run.checkpoints.find(name); checkpoint != run.checkpoints.end()) return checkpoint->second;
  }
  return absl::NotFoundError(absl::StrCat("there is no checkpoint '", name, "'; ListCheckpoints tells those there are"));
}

absl::StatusOr<std::vector<Checkpoint>> RunRegistry::ListCheckpoints(const std::string& run_name) const {
  absl::MutexLock lock(&mutex_);
  MOONPIPE_ASSIGN_OR_RETURN(const Run* run, FindLocked(run_name));
  std::vector<Checkpoint> checkpoints;
  for (auto entry = run->checkpoints.rbegin(); entry != run->checkpoints.rend(); ++entry) checkpoints.push_back(entry->second);
  return checkpoints;
}

absl::StatusOr<RunRegistry::Progress> RunRegistry::EventsAfter(const std::string& name, size_t next) const {
  absl::MutexLock lock(&mutex_);
  MOONPIPE_ASSIGN_OR_RETURN(const Run* run, FindLocked(name));
  Progress progress;
  progress.events.assign(run->events.begin() + static_cast<std::ptrdiff_t>(std::min(next, run->events.size())), run->events.end());
  progress.next = run->events.size();
  progress.ended = HasEnded(run->message.state());
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

RunRegistry::Wishes RunRegistry::TakeWishes(const std::string& id) {
  absl::MutexLock lock(&mutex_);
  Run& run = runs_.at(id);
  const Wishes wishes = run.wishes;
  run.wishes.save = false;
  return wishes;
}

void RunRegistry::WaitWhilePaused(const std::string& id, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  Run& run = runs_.at(id);
  auto changed = [&]() { return !run.wishes.pause || run.wishes.stop || run.wishes.save; };
  mutex_.AwaitWithDeadline(absl::Condition(&changed), deadline);
}

}  // namespace moonpipe
