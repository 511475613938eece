// The client's side of the control API: one method a call, each with its deadline, errors as absl::Status with their details.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/channel.h"
#include "moonpipe/cluster/v1/cluster_service.grpc.pb.h"
#include "moonpipe/runtime/channel.h"

namespace moonpipe {

class ControlClient {
 public:
  explicit ControlClient(const std::string& coordinator);

  absl::StatusOr<cluster::v1::TrainingRun> Create(const cluster::v1::CreateTrainingRunRequest& request);
  absl::StatusOr<cluster::v1::TrainingRun> Get(const std::string& name, absl::Duration patience = kControlDeadline);
  absl::StatusOr<std::vector<cluster::v1::TrainingRun>> List();
  absl::StatusOr<cluster::v1::TrainingRun> Pause(const std::string& name);
  absl::StatusOr<cluster::v1::TrainingRun> Resume(const std::string& name);
  absl::StatusOr<cluster::v1::TrainingRun> Stop(const std::string& name);
  absl::StatusOr<cluster::v1::Checkpoint> Save(const std::string& run_name);
  absl::StatusOr<cluster::v1::Checkpoint> GetCheckpoint(const std::string& name);

  // Calls `take` with every event until the run ends (OK), the stream breaks (its error) or `take` returns false (CANCELLED).
  absl::Status Watch(const std::string& name, uint64_t after_step,
                     const std::function<bool(const cluster::v1::WatchTrainingRunResponse&)>& take);
  // Ends a Watch from another thread.
  void CancelWatch();

 private:
  std::unique_ptr<cluster::v1::ClusterService::Stub> stub_;
  grpc::ClientContext watch_context_;
};

// `trainingRuns/ID` for an id or a full name.
std::string RunName(const std::string& id_or_name);

}  // namespace moonpipe
