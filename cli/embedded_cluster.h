// A whole cluster on this machine, as child processes: coordinator, dataloader, vision encoder and decoder stages, the same programs
// that run as pods. Every port is chosen by the system; addresses come from files in the run folder.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/runtime/process_launcher.h"

namespace moonpipe {

class EmbeddedCluster {
 public:
  struct Options {
    std::string runs_folder;
    std::string run_id;
    cluster::v1::TrainingRunSpec spec;
    bool has_vision = true;     // the model has a tower
    std::string log_format = "text";
  };
  // Starts the coordinator, waits for its address, starts the workers. Each service's log goes to RUN/logs/NAME.log. Blocks until the
  // coordinator serves; the workers register by themselves.
  static absl::StatusOr<std::unique_ptr<EmbeddedCluster>> Start(const Options& options);
  // Ends what still runs.
  ~EmbeddedCluster();

  const std::string& coordinator_address() const { return coordinator_address_; }
  // The first process that ended otherwise than with exit code 0; the coordinator before all others, which leave when it is gone.
  struct Failure {
    std::string what;  // "coordinator (pid 4711) was killed by signal 9 (Killed)"
    std::string log;   // where its log is, and the log's last lines
  };
  std::optional<Failure> FirstFailure() const;
  // Waits for the workers, which the coordinator drains, then ends the coordinator.
  void Finish(absl::Duration grace);
  // Stops everything at once.
  void Kill();

  struct Service {
    std::string name;
    pid_t pid;
  };
  std::vector<Service> services() const;

 private:
  EmbeddedCluster() = default;

  std::vector<std::unique_ptr<ChildProcess>> processes_;  // the coordinator first
  std::string coordinator_address_;
  std::string folder_;
  mutable absl::Mutex mutex_;
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moonpipe
