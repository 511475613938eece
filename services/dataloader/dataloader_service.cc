#include "services/dataloader/dataloader_service.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "moonpipe/runtime/rpc_error.h"

namespace moonpipe {

using data::v1::FetchMicrobatchRequest;
using data::v1::FetchMicrobatchResponse;

namespace {

constexpr uint64_t kChunkBytes = 1 << 20;

std::string ViewName(data::v1::MicrobatchView view) {
  return std::string(absl::StripPrefix(data::v1::MicrobatchView_Name(view), "MICROBATCH_VIEW_"));
}

// Writes a view in chunks. Deletes itself when gRPC is done with it.
class ViewWriter : public grpc::ServerWriteReactor<FetchMicrobatchResponse> {
 public:
  explicit ViewWriter(absl::StatusOr<DataloaderService::View> view) {
    if (!view.ok()) {
      Finish(ToGrpcStatus(view.status()));
      return;
    }
    view_ = *std::move(view);
    chunk_.set_total_bytes(view_.bytes);
    WriteNext();
  }

 private:
  void WriteNext() {
    const uint64_t size = std::min(kChunkBytes, view_.bytes - sent_);
    chunk_.set_chunk(view_.data + sent_, size);
    sent_ += size;
    StartWrite(&chunk_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::CANCELLED);
      return;
    }
    if (sent_ == view_.bytes) {
      Finish(grpc::Status::OK);
      return;
    }
    chunk_.clear_total_bytes();
    WriteNext();
  }
  void OnDone() override { delete this; }

  DataloaderService::View view_;
  FetchMicrobatchResponse chunk_;
  uint64_t sent_ = 0;
};

}  // namespace

void DataloaderService::SetPlan(const worker::v1::Plan& plan, std::optional<DataloaderMetrics> metrics) {
  absl::MutexLock lock(&mutex_);
  metrics_ = std::move(metrics);
  fetched_step_ = 0;
  generation_ = plan.generation();
  grants_.clear();
  for (const worker::v1::DataGrant& grant : plan.grants()) grants_[grant.access_token()] = grant;
  steps_.clear();
}

void DataloaderService::Hold(std::shared_ptr<const Step> step) {
  absl::MutexLock lock(&mutex_);
  const uint64_t number = step->manifest.step();
  steps_[number] = std::move(step);
  CountHeldLocked();
}

void DataloaderService::DropBefore(uint64_t step) {
  absl::MutexLock lock(&mutex_);
  steps_.erase(steps_.begin(), steps_.lower_bound(step));
}

void DataloaderService::Drop(uint64_t step) {
  absl::MutexLock lock(&mutex_);
  steps_.erase(step);
}

absl::StatusOr<DataloaderService::View> DataloaderService::Find(const FetchMicrobatchRequest& request) const {
  const std::string view_name = ViewName(request.view());
  absl::MutexLock lock(&mutex_);
  if (request.generation() != generation_) {
    return RpcError(absl::StatusCode::kAborted,
                    absl::StrCat("stale generation ", request.generation(), ": the dataloader serves generation ", generation_,
                                 "; wait for the new plan"),
                    "STALE_GENERATION",
                    {{"generation", absl::StrCat(request.generation())}, {"plan_generation", absl::StrCat(generation_)}});
  }
  auto grant = grants_.find(request.access_token());
  if (grant == grants_.end()) {
    return RpcError(absl::StatusCode::kPermissionDenied, "the access token is not of this plan", "ACCESS_TOKEN_UNKNOWN");
  }
  const auto& views = grant->second.views();
  if (std::find(views.begin(), views.end(), request.view()) == views.end()) {
    return RpcError(absl::StatusCode::kPermissionDenied,
                    absl::StrCat("worker ", grant->second.worker(), " may not fetch ", view_name, ": its plan does not need it"),
                    "VIEW_NOT_GRANTED", {{"worker", absl::StrCat(grant->second.worker())}, {"view", view_name}});
  }
  auto step = steps_.find(request.step());
  if (step == steps_.end()) {
    return RpcError(absl::StatusCode::kNotFound, absl::StrCat("step ", request.step(), " is not held by this dataloader"),
                    "STEP_NOT_HELD", {{"step", absl::StrCat(request.step())}});
  }
  const auto& microbatches = step->second->microbatches;
  if (request.microbatch() >= microbatches.size()) {
    return RpcError(absl::StatusCode::kInvalidArgument,
                    absl::StrCat("step ", request.step(), " has ", microbatches.size(), " microbatches, microbatch ",
                                 request.microbatch(), " was asked for"),
                    "MICROBATCH_OUT_OF_RANGE",
                    {{"step", absl::StrCat(request.step())},
                     {"microbatches", absl::StrCat(microbatches.size())},
                     {"microbatch", absl::StrCat(request.microbatch())}});
  }
  const Microbatch& microbatch = microbatches[request.microbatch()];
  View found;
  found.owner = step->second;
  switch (request.view()) {
    case data::v1::MICROBATCH_VIEW_TOKENS:
      found.data = reinterpret_cast<const char*>(microbatch.token_ids.data());
      found.bytes = microbatch.token_ids.size() * sizeof(int32_t);
      break;
    case data::v1::MICROBATCH_VIEW_LABELS:
      found.data = reinterpret_cast<const char*>(microbatch.labels.data());
      found.bytes = microbatch.labels.size() * sizeof(int32_t);
      break;
    case data::v1::MICROBATCH_VIEW_PIXELS:
      found.data = reinterpret_cast<const char*>(microbatch.patches.data());
      found.bytes = microbatch.patches.size();
      break;
    case data::v1::MICROBATCH_VIEW_EMBEDDINGS:
      found.data = reinterpret_cast<const char*>(microbatch.embeddings.data());
      found.bytes = microbatch.embeddings.size() * sizeof(float);
      break;
    default:
      return RpcError(absl::StatusCode::kInvalidArgument, "no view was named", "VIEW_MISSING");
  }
  return found;
}

grpc::ServerWriteReactor<FetchMicrobatchResponse>* DataloaderService::FetchMicrobatch(
    grpc::CallbackServerContext*, const FetchMicrobatchRequest* request) {
  absl::StatusOr<View> view = Find(*request);
  Count(*request, view);
  return new ViewWriter(std::move(view));
}

void DataloaderService::Count(const FetchMicrobatchRequest& request, const absl::StatusOr<View>& view) {
  absl::MutexLock lock(&mutex_);
  if (view.ok()) fetched_step_ = std::max(fetched_step_, request.step());
  if (!metrics_.has_value()) return;
  if (view.ok()) {
    const std::string name = absl::AsciiStrToLower(ViewName(request.view()));
    metrics_->views(name).Add();
    metrics_->view_bytes(name).Add(static_cast<double>(view->bytes));
    CountHeldLocked();
  } else if (absl::IsPermissionDenied(view.status())) {
    metrics_->denied_fetches.Add();
  }
}

void DataloaderService::CountHeldLocked() {
  if (!metrics_.has_value()) return;
  metrics_->prefetched_steps.Set(static_cast<double>(std::distance(steps_.upper_bound(fetched_step_), steps_.end())));
}

}  // namespace moonpipe
