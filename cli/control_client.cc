#include "cli/control_client.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/runtime/rpc_error.h"

namespace moonpipe {

using namespace cluster::v1;  // NOLINT: this file is about nothing else

namespace {

// One unary call with the deadline of control calls. A coordinator that is still coming up is waited for within it.
template <typename Request, typename Response>
absl::StatusOr<Response> Call(ClusterService::Stub* stub,
                              grpc::Status (ClusterService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                              const Request& request, absl::Duration patience = kControlDeadline) {
  grpc::ClientContext context;
  SetDeadline(&context, patience);
  context.set_wait_for_ready(true);
  Response response;
  const grpc::Status status = (stub->*method)(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

template <typename Request>
Request Named(const std::string& name) {
  Request request;
  request.set_name(name);
  return request;
}

}  // namespace

ControlClient::ControlClient(const std::string& coordinator) : stub_(ClusterService::NewStub(MakeChannel(coordinator))) {}

absl::StatusOr<TrainingRun> ControlClient::Create(const CreateTrainingRunRequest& request) {
  return Call(stub_.get(), &ClusterService::Stub::CreateTrainingRun, request);
}
absl::StatusOr<TrainingRun> ControlClient::Get(const std::string& name, absl::Duration patience) {
  return Call(stub_.get(), &ClusterService::Stub::GetTrainingRun, Named<GetTrainingRunRequest>(name), patience);
}
absl::StatusOr<std::vector<TrainingRun>> ControlClient::List() {
  std::vector<TrainingRun> runs;
  ListTrainingRunsRequest request;
  do {
    MOONPIPE_ASSIGN_OR_RETURN(const ListTrainingRunsResponse page,
                              Call(stub_.get(), &ClusterService::Stub::ListTrainingRuns, request));
    runs.insert(runs.end(), page.training_runs().begin(), page.training_runs().end());
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  return runs;
}
absl::StatusOr<TrainingRun> ControlClient::Pause(const std::string& name) {
  return Call(stub_.get(), &ClusterService::Stub::PauseTrainingRun, Named<PauseTrainingRunRequest>(name));
}
absl::StatusOr<TrainingRun> ControlClient::Resume(const std::string& name) {
  return Call(stub_.get(), &ClusterService::Stub::ResumeTrainingRun, Named<ResumeTrainingRunRequest>(name));
}
absl::StatusOr<TrainingRun> ControlClient::Stop(const std::string& name) {
  return Call(stub_.get(), &ClusterService::Stub::StopTrainingRun, Named<StopTrainingRunRequest>(name));
}
absl::StatusOr<Checkpoint> ControlClient::Save(const std::string& run_name) {
  SaveCheckpointRequest request;
  request.set_parent(run_name);
  return Call(stub_.get(), &ClusterService::Stub::SaveCheckpoint, request);
}
absl::StatusOr<Checkpoint> ControlClient::GetCheckpoint(const std::string& name) {
  return Call(stub_.get(), &ClusterService::Stub::GetCheckpoint, Named<GetCheckpointRequest>(name));
}

absl::Status ControlClient::Watch(const std::string& name, uint64_t after_step,
                                  const std::function<bool(const WatchTrainingRunResponse&)>& take) {
  WatchTrainingRunRequest request;
  request.set_name(name);
  request.set_after_step(after_step);
  // No deadline: a run may take weeks. Keepalive notices a coordinator that is gone.
  auto reader = stub_->WatchTrainingRun(&watch_context_, request);
  WatchTrainingRunResponse response;
  while (reader->Read(&response)) {
    if (!take(response)) watch_context_.TryCancel();
  }
  return FromGrpcStatus(reader->Finish());
}

void ControlClient::CancelWatch() { watch_context_.TryCancel(); }

std::string RunName(const std::string& id_or_name) {
  return absl::StartsWith(id_or_name, "trainingRuns/") ? id_or_name : absl::StrCat("trainingRuns/", id_or_name);
}

}  // namespace moonpipe
