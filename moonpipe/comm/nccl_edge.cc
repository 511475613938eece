#include "moonpipe/comm/nccl_edge.h"

#include <algorithm>
#include <cstdlib>
#include <deque>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/comm/stream_store.h"

namespace moonpipe {
namespace {

constexpr int kSenderRank = 0;
constexpr int kReceiverRank = 1;
// A CUDA event cannot be waited for together with an abort, so it is looked at; the aborting thread's signal ends the pause.
constexpr absl::Duration kPollPause = absl::Microseconds(20);

std::string FirstLine(const std::string& words) { return words.substr(0, words.find('\n')); }

class C10dNcclEdge : public NcclEdge {
 public:
  explicit C10dNcclEdge(NcclEdgeOptions options) : options_(std::move(options)) {}

  absl::Status Start(Rendezvous* rendezvous, absl::Time deadline) {
    return Guarded([&]() -> absl::Status {
      const int devices = c10::cuda::device_count();
      if (options_.device < 0 || options_.device >= devices) {
        return absl::InvalidArgumentError(
            absl::StrCat(prefix(), ": there is no CUDA device ", options_.device, "; this process sees ", devices));
      }
      // c10d's watchdog would end the process on an error that this edge reports; an explicit setting of the user stays.
      ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", 0);
      const auto timeout =
          absl::ToChronoMilliseconds(std::clamp(deadline - absl::Now(), absl::Milliseconds(1), absl::Hours(1)));
      auto nccl = c10d::ProcessGroupNCCL::Options::create();
      // The deadline of each call is kept here, not there.
      nccl->timeout = std::chrono::hours(24);
      const std::string prefix_key = absl::StrCat("nccl/", options_.generation, "/", options_.name, "/");
      group_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(
          c10::make_intrusive<StreamStore>(rendezvous, prefix_key, timeout), options_.sends ? kSenderRank : kReceiverRank, 2,
          nccl);
      return absl::OkStatus();
    });
  }

  ~C10dNcclEdge() override { Abort(absl::CancelledError("the edge was destroyed")); }

  absl::Status Send(const at::Tensor& tensor, absl::Time deadline) override {
    if (!options_.sends) return absl::InvalidArgumentError(absl::StrCat(prefix(), ": this is the receiving end"));
    MOONPIPE_RETURN_IF_ERROR(Check(tensor));
    return Guarded([&]() -> absl::Status {
      while (!under_way_.empty() && under_way_.front()->isCompleted()) under_way_.pop_front();
      while (under_way_.size() >= options_.capacity) MOONPIPE_RETURN_IF_ERROR(FinishOldest(deadline));
      const c10::cuda::CUDAGuard device(static_cast<c10::DeviceIndex>(options_.device));
      std::vector<at::Tensor> tensors = {tensor.detach()};
      under_way_.push_back(group_->send(tensors, kReceiverRank, 0));
      Count(tensor);
      return absl::OkStatus();
    });
  }

  absl::Status Receive(at::Tensor& tensor, absl::Time deadline) override {
    if (options_.sends) return absl::InvalidArgumentError(absl::StrCat(prefix(), ": this is the sending end"));
    MOONPIPE_RETURN_IF_ERROR(Check(tensor));
    return Guarded([&]() -> absl::Status {
      const c10::cuda::CUDAGuard device(static_cast<c10::DeviceIndex>(options_.device));
      std::vector<at::Tensor> tensors = {tensor.detach()};
      under_way_.push_back(group_->recv(tensors, kSenderRank, 0));
      MOONPIPE_RETURN_IF_ERROR(FinishOldest(deadline));
      Count(tensor);
      return absl::OkStatus();
    });
  }

  absl::Status Flush(absl::Time deadline) override {
    return Guarded([&]() -> absl::Status {
      while (!under_way_.empty()) MOONPIPE_RETURN_IF_ERROR(FinishOldest(deadline));
      return absl::OkStatus();
    });
  }

  void Abort(const absl::Status& reason) override {
    (void)Fail(Annotate(reason.ok() ? absl::AbortedError("aborted") : reason, prefix()));
  }

  EdgeCounters counters() const override {
    absl::MutexLock lock(&mutex_);
    return counters_;
  }
  const std::string& name() const override { return options_.name; }
  std::string transport() const override { return "nccl"; }

 private:
  std::string prefix() const { return absl::StrCat("edge ", options_.name); }

  absl::Status Check(const at::Tensor& tensor) const {
    if (!tensor.is_cuda() || tensor.get_device() != options_.device || !tensor.is_contiguous()) {
      return absl::InvalidArgumentError(absl::StrCat(prefix(), ": the tensor is on ", tensor.device().str(),
                                                     tensor.is_contiguous() ? "" : " and not contiguous",
                                                     ", must be contiguous on cuda:", options_.device));
    }
    if (tensor.nbytes() > options_.max_message_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(prefix(), ": message of ", tensor.nbytes(),
                                                     " bytes is over the limit of ", options_.max_message_bytes, " bytes"));
    }
    return absl::OkStatus();
  }

  void Count(const at::Tensor& tensor) {
    absl::MutexLock lock(&mutex_);
    ++counters_.messages;
    counters_.payload_bytes += tensor.nbytes();
  }

  // Runs `work` unless the edge is dead. What NCCL or CUDA throws ends the edge.
  template <typename Work>
  absl::Status Guarded(const Work& work) {
    {
      absl::MutexLock lock(&mutex_);
      if (!failure_.ok()) return failure_;
    }
    try {
      return work();
    } catch (const std::exception& error) {
      return Fail(absl::UnavailableError(absl::StrCat(prefix(), ": ", FirstLine(error.what()))));
    } catch (...) {
      return Fail(absl::UnknownError(absl::StrCat(prefix(), ": an exception of unknown type")));
    }
  }

  absl::Status FinishOldest(absl::Time deadline) {
    const absl::Time begin = absl::Now();
    const c10::intrusive_ptr<c10d::Work> work = under_way_.front();
    while (!work->isCompleted()) {
      {
        absl::MutexLock lock(&mutex_);
        mutex_.AwaitWithTimeout(absl::Condition(this, &C10dNcclEdge::FailedLocked), kPollPause);
        if (!failure_.ok()) return failure_;
      }
      if (absl::Now() >= deadline) {
        return Fail(absl::DeadlineExceededError(
            absl::StrCat(prefix(), ": waited ", absl::FormatDuration(absl::Trunc(absl::Now() - begin, absl::Milliseconds(1))),
                         options_.sends ? " for the peer to receive; " : " for the peer to send; ", under_way_.size(),
                         " messages are under way")));
      }
    }
    under_way_.pop_front();
    if (const std::exception_ptr error = work->exception()) std::rethrow_exception(error);
    return absl::OkStatus();
  }

  bool FailedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !failure_.ok(); }

  // Returns the first failure, which may be an earlier one.
  absl::Status Fail(const absl::Status& failure) {
    {
      absl::MutexLock lock(&mutex_);
      if (!failure_.ok()) return failure_;
      failure_ = failure;
    }
    if (group_ != nullptr) {
      try {
        group_->abort();
      } catch (...) {
        // The communicator is lost in either case; the first reason is the one to tell.
      }
    }
    return failure;
  }

  const NcclEdgeOptions options_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;
  // Of the calling thread alone.
  std::deque<c10::intrusive_ptr<c10d::Work>> under_way_;
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  EdgeCounters counters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<NcclEdge>> MakeNcclEdge(const NcclEdgeOptions& options, Rendezvous* rendezvous,
                                                       absl::Time deadline) {
  if (options.capacity == 0) {
    return absl::InvalidArgumentError(absl::StrCat("edge ", options.name, ": capacity is 0, must be at least 1"));
  }
  auto edge = std::make_unique<C10dNcclEdge>(options);
  MOONPIPE_RETURN_IF_ERROR(edge->Start(rendezvous, deadline));
  return edge;
}

}  // namespace moonpipe
