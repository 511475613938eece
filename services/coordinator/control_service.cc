#include "services/coordinator/control_service.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/pipeline/stage_split.h"
#include "moonpipe/runtime/rpc_error.h"
#include "moonpipe/spec/flavors.h"
#include "moonpipe/spec/tensor_list.h"
#include "moonpipe/train/lr_schedule.h"
#include "moonpipe/train/parameter_groups.h"

namespace moonpipe {

using namespace cluster::v1;  // NOLINT: this file is about nothing else

namespace {

// Requests are small; answers come from memory: every unary call is answered at once on the thread that brings it.
template <typename Message>
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, absl::StatusOr<Message> result, Message* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (result.ok()) {
    *response = *std::move(result);
    reactor->Finish(grpc::Status::OK);
  } else {
    reactor->Finish(ToGrpcStatus(result.status()));
  }
  return reactor;
}

bool IsValidId(const std::string& id) {
  if (id.size() < 4 || id.size() > 63 || id[0] < 'a' || id[0] > 'z') return false;
  return std::all_of(id.begin(), id.end(), [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-'; });
}

// Offset pages: the token is the index of the next element.
absl::StatusOr<std::pair<size_t, size_t>> Page(size_t size, int32_t page_size, const std::string& token) {
  size_t begin = 0;
  if (!token.empty() && !absl::SimpleAtoi(token, &begin)) {
    return RpcError(absl::StatusCode::kInvalidArgument, absl::StrCat("page_token '", token, "' is none that this service gave"),
                    "INVALID_PAGE_TOKEN", {{"page_token", token}});
  }
  if (page_size < 0) {
    return RpcError(absl::StatusCode::kInvalidArgument, absl::StrCat("page_size is ", page_size, ", not 0 or more"),
                    "INVALID_PAGE_SIZE", {{"page_size", absl::StrCat(page_size)}});
  }
  begin = std::min(begin, size);
  return std::pair(begin, std::min(size, begin + (page_size == 0 ? 50 : static_cast<size_t>(page_size))));
}

// Sends a run's events as they come. Deletes itself when gRPC is done with it.
class Watcher : public grpc::ServerWriteReactor<WatchTrainingRunResponse> {
 public:
  Watcher(RunRegistry* runs, std::string name, uint64_t after_step)
      : runs_(runs), name_(std::move(name)), after_step_(after_step) {
    listener_ = runs_->AddListener([this] { Wake(); });
    Wake();
  }

 private:
  // Starts the next write if there is something to say. Called on a new event, after a write, and at the start.
  void Wake() {
    absl::MutexLock lock(&mutex_);
    if (writing_ || finished_) return;
    while (true) {
      const absl::StatusOr<RunRegistry::Progress> progress = runs_->EventAt(name_, next_);
      if (!progress.ok()) return FinishLocked(ToGrpcStatus(progress.status()));
      if (progress->event == nullptr) {
        if (progress->ended) FinishLocked(grpc::Status::OK);
        return;
      }
      current_ = progress->event;
      ++next_;
      if (current_->has_step() && current_->step().step() <= after_step_) continue;
      writing_ = true;
      StartWrite(current_.get());
      return;
    }
  }
  void FinishLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    finished_ = true;
    Finish(status);
  }
  void OnWriteDone(bool ok) override {
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      if (!ok && !finished_) return FinishLocked(grpc::Status::CANCELLED);
    }
    Wake();
  }
  void OnCancel() override {
    absl::MutexLock lock(&mutex_);
    if (!finished_ && !writing_) FinishLocked(grpc::Status::CANCELLED);
  }
  void OnDone() override {
    runs_->RemoveListener(listener_);
    delete this;
  }

  RunRegistry* const runs_;
  const std::string name_;
  const uint64_t after_step_;
  uint64_t listener_ = 0;
  absl::Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  RunRegistry::Event current_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

absl::Status CheckCreateRequest(const CreateTrainingRunRequest& request, TrainingRunSpec* resolved) {
  std::vector<FieldViolation> violations;
  if (!IsValidId(request.training_run_id())) {
    violations.push_back({"training_run_id", absl::StrCat("'", request.training_run_id(),
                                                          "' is not 4 to 63 lower-case letters, digits and hyphens beginning with a letter")});
  }
  *resolved = request.spec();
  ResolveDefaults(resolved);
  for (FieldViolation& violation : ValidateSpec(*resolved)) {
    violation.field = absl::StrCat("spec.", violation.field);
    violations.push_back(std::move(violation));
  }
  if (!violations.empty()) return InvalidSpecError(violations);
  const absl::StatusOr<ModelConfig> config = ReadModelOf(resolved->model());
  if (!config.ok()) {
    const char* field = resolved->model().has_flavor() ? "spec.model.flavor" : resolved->model().has_path() ? "spec.model.path" : "spec.model.config";
    return InvalidSpecError({{field, std::string(config.status().message())}});
  }
  const std::vector<TensorSpec> tensors = ListTensors(*config);
  if (const auto rules = AssignUpdateRules(resolved->optimizer(), tensors, tensors); !rules.ok()) {
    return InvalidSpecError({{"spec.optimizer.groups", std::string(rules.status().message())}});
  }
  if (const absl::Status schedule = CheckLearningRateSchedule(resolved->optimizer().schedule(), resolved->train().steps());
      !schedule.ok()) {
    return InvalidSpecError({{"spec.optimizer.schedule", std::string(schedule.message())}});
  }
  const auto stages = static_cast<int32_t>(resolved->pipeline().stages());
  const std::vector<uint32_t> layers(resolved->pipeline().layers_per_stage().begin(), resolved->pipeline().layers_per_stage().end());
  const auto split = layers.empty() ? SplitLayers(CostsOf(*config), stages)
                                    : SplitLayersAs(layers, config->text.num_hidden_layers, stages);
  if (!split.ok()) return InvalidSpecError({{"spec.pipeline.stages", std::string(split.status().message())}});
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* ControlService::CreateTrainingRun(grpc::CallbackServerContext* context,
                                                            const CreateTrainingRunRequest* request, TrainingRun* response) {
  auto create = [&]() -> absl::StatusOr<TrainingRun> {
    TrainingRunSpec spec;
    if (absl::Status checked = CheckCreateRequest(*request, &spec); !checked.ok()) return checked;
    return runs_->Create(request->training_run_id(), spec, request->request_id(), request->evaluate_only(),
                         request->validate_only());
  };
  return Answer(context, create(), response);
}

grpc::ServerUnaryReactor* ControlService::GetTrainingRun(grpc::CallbackServerContext* context,
                                                         const GetTrainingRunRequest* request, TrainingRun* response) {
  return Answer(context, runs_->Get(request->name()), response);
}

grpc::ServerUnaryReactor* ControlService::ListTrainingRuns(grpc::CallbackServerContext* context,
                                                           const ListTrainingRunsRequest* request,
                                                           ListTrainingRunsResponse* response) {
  auto list = [&]() -> absl::StatusOr<ListTrainingRunsResponse> {
    const std::vector<TrainingRun> runs = runs_->List();
    const auto page = Page(runs.size(), request->page_size(), request->page_token());
    if (!page.ok()) return page.status();
    ListTrainingRunsResponse answer;
    for (size_t i = page->first; i < page->second; ++i) *answer.add_training_runs() = runs[i];
    if (page->second < runs.size()) answer.set_next_page_token(absl::StrCat(page->second));
    return answer;
  };
  return Answer(context, list(), response);
}

grpc::ServerWriteReactor<WatchTrainingRunResponse>* ControlService::WatchTrainingRun(grpc::CallbackServerContext*,
                                                                                     const WatchTrainingRunRequest* request) {
  return new Watcher(runs_, request->name(), request->after_step());
}

grpc::ServerUnaryReactor* ControlService::PauseTrainingRun(grpc::CallbackServerContext* context,
                                                           const PauseTrainingRunRequest* request, TrainingRun* response) {
  return Answer(context, runs_->Command(request->name(), RunCommand::kPause, request->etag()), response);
}

grpc::ServerUnaryReactor* ControlService::ResumeTrainingRun(grpc::CallbackServerContext* context,
                                                            const ResumeTrainingRunRequest* request, TrainingRun* response) {
  return Answer(context, runs_->Command(request->name(), RunCommand::kResume, request->etag()), response);
}

grpc::ServerUnaryReactor* ControlService::StopTrainingRun(grpc::CallbackServerContext* context,
                                                          const StopTrainingRunRequest* request, TrainingRun* response) {
  return Answer(context, runs_->Command(request->name(), RunCommand::kStop, request->etag()), response);
}

grpc::ServerUnaryReactor* ControlService::SaveCheckpoint(grpc::CallbackServerContext* context,
                                                         const SaveCheckpointRequest* request, Checkpoint* response) {
  return Answer(context, runs_->RequestSave(request->parent(), request->request_id()), response);
}

grpc::ServerUnaryReactor* ControlService::GetCheckpoint(grpc::CallbackServerContext* context, const GetCheckpointRequest* request,
                                                        Checkpoint* response) {
  return Answer(context, runs_->GetCheckpoint(request->name()), response);
}

grpc::ServerUnaryReactor* ControlService::ListCheckpoints(grpc::CallbackServerContext* context,
                                                          const ListCheckpointsRequest* request,
                                                          ListCheckpointsResponse* response) {
  auto list = [&]() -> absl::StatusOr<ListCheckpointsResponse> {
    const auto checkpoints = runs_->ListCheckpoints(request->parent());
    if (!checkpoints.ok()) return checkpoints.status();
    const auto page = Page(checkpoints->size(), request->page_size(), request->page_token());
    if (!page.ok()) return page.status();
    ListCheckpointsResponse answer;
    for (size_t i = page->first; i < page->second; ++i) *answer.add_checkpoints() = (*checkpoints)[i];
    if (page->second < checkpoints->size()) answer.set_next_page_token(absl::StrCat(page->second));
    return answer;
  };
  return Answer(context, list(), response);
}

}  // namespace moonpipe
