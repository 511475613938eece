#include "services/dataloader/dataloader_service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace moonpipe {

using data::v1::FetchMicrobatchRequest;
using data::v1::FetchMicrobatchResponse;

namespace {

constexpr uint64_t kChunkBytes = 1 << 20;

// Writes a view in chunks. Deletes itself when gRPC is done with it.
class ViewWriter : public grpc::ServerWriteReactor<FetchMicrobatchResponse> {
 public:
  explicit ViewWriter(absl::StatusOr<DataloaderService::View> view) {
    if (!view.ok()) {
      Finish(grpc::Status(static_cast<grpc::StatusCode>(view.status().code()), std::string(view.status().message())));
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

void DataloaderService::SetPlan(const worker::v1::Plan& plan) {
  absl::MutexLock lock(&mutex_);
  generation_ = plan.generation();
  grants_.clear();
  for (const worker::v1::DataGrant& grant : plan.grants()) grants_[grant.access_token()] = grant;
  steps_.clear();
}

void DataloaderService::Hold(std::shared_ptr<const Step> step) {
  absl::MutexLock lock(&mutex_);
  const uint64_t number = step->manifest.step();
  steps_[number] = std::move(step);
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
  const std::string view_name(
      absl::StripPrefix(data::v1::MicrobatchView_Name(request.view()), "MICROBATCH_VIEW_"));
  absl::MutexLock lock(&mutex_);
  if (request.generation() != generation_) {
    return absl::AbortedError(absl::StrCat("stale generation ", request.generation(), ": the dataloader serves generation ",
                                           generation_, "; wait for the new plan"));
  }
  auto grant = grants_.find(request.access_token());
  if (grant == grants_.end()) return absl::PermissionDeniedError("the access token is not of this plan");
  const auto& views = grant->second.views();
  if (std::find(views.begin(), views.end(), request.view()) == views.end()) {
    return absl::PermissionDeniedError(
        absl::StrCat("worker ", grant->second.worker(), " may not fetch ", view_name, ": its plan does not need it"));
  }
  auto step = steps_.find(request.step());
  if (step == steps_.end()) {
    return absl::NotFoundError(absl::StrCat("step ", request.step(), " is not held by this dataloader"));
  }
  const auto& microbatches = step->second->microbatches;
  if (request.microbatch() >= microbatches.size()) {
    return absl::InvalidArgumentError(absl::StrCat("step ", request.step(), " has ", microbatches.size(),
                                                   " microbatches, microbatch ", request.microbatch(), " was asked for"));
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
    default:
      return absl::InvalidArgumentError("no view was named");
  }
  return found;
}

grpc::ServerWriteReactor<FetchMicrobatchResponse>* DataloaderService::FetchMicrobatch(
    grpc::CallbackServerContext*, const FetchMicrobatchRequest* request) {
  return new ViewWriter(Find(*request));
}

}  // namespace moonpipe
