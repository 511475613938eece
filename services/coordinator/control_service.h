// The control API as gRPC: adapters from ClusterService to the run registry. Decides nothing but what is a valid request.
#pragma once

#include <string>

#include "moonpipe/cluster/v1/cluster_service.grpc.pb.h"
#include "services/coordinator/run_registry.h"

namespace moonpipe {

class ControlService : public cluster::v1::ClusterService::CallbackService {
 public:
  explicit ControlService(RunRegistry* runs) : runs_(runs) {}

  grpc::ServerUnaryReactor* CreateTrainingRun(grpc::CallbackServerContext* context,
                                              const cluster::v1::CreateTrainingRunRequest* request,
                                              cluster::v1::TrainingRun* response) override;
  grpc::ServerUnaryReactor* GetTrainingRun(grpc::CallbackServerContext* context,
                                           const cluster::v1::GetTrainingRunRequest* request,
                                           cluster::v1::TrainingRun* response) override;
  grpc::ServerUnaryReactor* ListTrainingRuns(grpc::CallbackServerContext* context,
                                             const cluster::v1::ListTrainingRunsRequest* request,
                                             cluster::v1::ListTrainingRunsResponse* response) override;
  grpc::ServerWriteReactor<cluster::v1::WatchTrainingRunResponse>* WatchTrainingRun(
      grpc::CallbackServerContext* context, const cluster::v1::WatchTrainingRunRequest* request) override;
  grpc::ServerUnaryReactor* PauseTrainingRun(grpc::CallbackServerContext* context,
                                             const cluster::v1::PauseTrainingRunRequest* request,
                                             cluster::v1::TrainingRun* response) override;
  grpc::ServerUnaryReactor* ResumeTrainingRun(grpc::CallbackServerContext* context,
                                              const cluster::v1::ResumeTrainingRunRequest* request,
                                              cluster::v1::TrainingRun* response) override;
  grpc::ServerUnaryReactor* StopTrainingRun(grpc::CallbackServerContext* context,
                                            const cluster::v1::StopTrainingRunRequest* request,
                                            cluster::v1::TrainingRun* response) override;
  grpc::ServerUnaryReactor* SaveCheckpoint(grpc::CallbackServerContext* context,
                                           const cluster::v1::SaveCheckpointRequest* request,
                                           cluster::v1::Checkpoint* response) override;
  grpc::ServerUnaryReactor* GetCheckpoint(grpc::CallbackServerContext* context,
                                          const cluster::v1::GetCheckpointRequest* request,
                                          cluster::v1::Checkpoint* response) override;
  grpc::ServerUnaryReactor* ListCheckpoints(grpc::CallbackServerContext* context,
                                            const cluster::v1::ListCheckpointsRequest* request,
                                            cluster::v1::ListCheckpointsResponse* response) override;

 private:
  RunRegistry* const runs_;
};

// What CreateTrainingRun refuses before anything starts: bad fields, a model file that cannot be read, options that the model does not
// support, a group that matches no parameter. INVALID_ARGUMENT with one google.rpc.BadRequest violation a field.
absl::Status CheckCreateRequest(const cluster::v1::CreateTrainingRunRequest& request, cluster::v1::TrainingRunSpec* resolved);

}  // namespace moonpipe
