// Serves the views of the steps that the dataloader holds. Who may fetch what is decided by access tokens that the coordinator gave
// with its plan: the owner of the vision tower gets pixels, the first stage tokens, the last stage labels, nobody else anything.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "moonpipe/data/step_source.h"
#include "moonpipe/data/v1/data_service.grpc.pb.h"
#include "moonpipe/worker/v1/plan.pb.h"

namespace moonpipe {

class DataloaderService : public data::v1::DataService::CallbackService {
 public:
  // Forgets all steps and serves only callers of this plan from now on.
  void SetPlan(const worker::v1::Plan& plan);
  // Keeps a step until Drop.
  void Hold(std::shared_ptr<const Step> step);
  // Forgets the steps before `step`.
  void DropBefore(uint64_t step);
  void Drop(uint64_t step);

  grpc::ServerWriteReactor<data::v1::FetchMicrobatchResponse>* FetchMicrobatch(
      grpc::CallbackServerContext* context, const data::v1::FetchMicrobatchRequest* request) override;

  // The view's bytes and the step that owns them. PERMISSION_DENIED, NOT_FOUND, ABORTED, INVALID_ARGUMENT as the proto says.
  struct View {
    std::shared_ptr<const Step> owner;
    const char* data = nullptr;
    uint64_t bytes = 0;
  };
  absl::StatusOr<View> Find(const data::v1::FetchMicrobatchRequest& request) const;

 private:
  mutable absl::Mutex mutex_;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, worker::v1::DataGrant> grants_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::shared_ptr<const Step>> steps_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moonpipe
