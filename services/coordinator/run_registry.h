// The training runs of a coordinator and what people asked of them: the state behind the control API. Thread-safe. The run's own
// thread reports here what happens; control calls leave their wishes here, which that thread reads between two steps.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "moonpipe/cluster/v1/checkpoint.pb.h"
#include "moonpipe/cluster/v1/cluster_service.pb.h"

namespace moonpipe {

// What a person can ask of a run.
enum class RunCommand { kPause, kResume, kStop, kSave };

// Whether a run in this state can follow the command; FAILED_PRECONDITION names state and command otherwise. A pure function.
absl::Status CheckCommand(cluster::v1::TrainingRun::State state, RunCommand command);

// True for STOPPED, SUCCEEDED and FAILED.
bool HasEnded(cluster::v1::TrainingRun::State state);

class RunRegistry {
 public:
  struct Wishes {
    bool pause = false;
    bool stop = false;
    bool save = false;
  };
  // What a watcher is told; called under no lock, in order, from the reporting thread.
  using Event = std::shared_ptr<const cluster::v1::WatchTrainingRunResponse>;

  explicit RunRegistry(std::string runs_folder) : runs_folder_(std::move(runs_folder)) {}

  // -- for the control API --
  // ALREADY_EXISTS for an id that is in use, unless request_id is the first call's; FAILED_PRECONDITION while another run is active.
  absl::StatusOr<cluster::v1::TrainingRun> Create(const std::string& id, const cluster::v1::TrainingRunSpec& spec,
                                                  const std::string& request_id, bool evaluate_only);
  absl::StatusOr<cluster::v1::TrainingRun> Get(const std::string& name) const;
  std::vector<cluster::v1::TrainingRun> List() const;  // newest first
  // ABORTED for a stale etag.
  absl::StatusOr<cluster::v1::TrainingRun> Command(const std::string& name, RunCommand command, const std::string& etag);
  // The checkpoint that will be written after the step in progress.
  absl::StatusOr<cluster::v1::Checkpoint> RequestSave(const std::string& run_name);
  absl::StatusOr<cluster::v1::Checkpoint> GetCheckpoint(const std::string& name) const;
  absl::StatusOr<std::vector<cluster::v1::Checkpoint>> ListCheckpoints(const std::string& run_name) const;  // newest first
  // Events after `after_step` that have happened, then each new one until the run ends. Returns where `EventsAfter` goes on.
  struct Progress {
    std::vector<Event> events;
    size_t next = 0;
    bool ended = false;
  };
  absl::StatusOr<Progress> EventsAfter(const std::string& name, size_t next) const;
  // Called (with no lock held) whenever any run has a new event; returns a handle for RemoveListener.
  uint64_t AddListener(std::function<void()> listener);
  void RemoveListener(uint64_t handle);

  // -- for the run's thread --
  // The next run to drive; DEADLINE_EXCEEDED.
  struct Job {
    std::string id;
    cluster::v1::TrainingRun run;
    bool evaluate_only = false;
  };
  absl::StatusOr<Job> WaitForJob(absl::Time deadline);
  void Update(const std::string& id, const std::function<void(cluster::v1::TrainingRun&)>& change);
  void PublishStep(const std::string& id, const cluster::v1::StepEvent& step);
  void PutCheckpoint(const std::string& id, const cluster::v1::Checkpoint& checkpoint);
  // Takes the wish to save; pause and stop stay until they are followed.
  Wishes TakeWishes(const std::string& id);
  // Blocks while the wish is to pause; returns at a resume, a stop, a save or the deadline.
  void WaitWhilePaused(const std::string& id, absl::Time deadline);

 private:
  struct Run {
    cluster::v1::TrainingRun message;
    std::string request_id;
    bool evaluate_only = false;
    bool started = false;
    Wishes wishes;
    std::vector<Event> events;
    std::map<std::string, cluster::v1::Checkpoint> checkpoints;  // by name; ids sort by step
    uint64_t version = 0;
  };

  absl::StatusOr<Run*> FindLocked(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<const Run*> FindLocked(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void TouchLocked(Run& run);
  void Notify();

  const std::string runs_folder_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Run> runs_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> order_ ABSL_GUARDED_BY(mutex_);
  absl::Mutex listeners_mutex_;
  std::map<uint64_t, std::function<void()>> listeners_ ABSL_GUARDED_BY(listeners_mutex_);
  uint64_t last_listener_ ABSL_GUARDED_BY(listeners_mutex_) = 0;
};

}  // namespace moonpipe
