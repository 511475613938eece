#include "moonpipe/comm/c10d_group.h"

#include <algorithm>
#include <map>
#include <system_error>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/comm/stream_store.h"

namespace moonpipe {
namespace {

constexpr int64_t kGatherPieceBytes = int64_t{16} << 20;

std::chrono::milliseconds Left(absl::Time deadline) {
  return absl::ToChronoMilliseconds(std::clamp(deadline - absl::Now(), absl::Milliseconds(1), absl::Hours(1)));
}

// Gloo and the store tell the cause in words only.
absl::Status FromWords(const std::string& name, const std::string& words) {
  const std::string first_line = words.substr(0, words.find('\n'));
  const std::string small = absl::AsciiStrToLower(words);
  const bool late = absl::StrContains(small, "timed out") || absl::StrContains(small, "timeout") ||
                    absl::StrContains(words, "DEADLINE_EXCEEDED");
  const absl::StatusCode code = late                                  ? absl::StatusCode::kDeadlineExceeded
                                : absl::StrContains(words, "ABORTED:") ? absl::StatusCode::kAborted
                                                                      : absl::StatusCode::kUnavailable;
  return absl::Status(code, absl::StrCat("group ", name, ": ", first_line));
}

absl::Status FromException(const std::string& name, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return FromWords(name, exception.what());
  } catch (...) {
    return absl::UnknownError(absl::StrCat("group ", name, ": an exception of unknown type"));
  }
}

// One event loop per address for the life of the process, since groups come and go with every plan.
std::shared_ptr<gloo::transport::Device> DeviceOf(const std::string& host) {
  static absl::Mutex mutex;
  static auto& devices = *new std::map<std::string, std::shared_ptr<gloo::transport::Device>>;
  absl::MutexLock lock(&mutex);
  auto& device = devices[host];
  if (device == nullptr) device = c10d::ProcessGroupGloo::createDeviceForHostname(host);
  return device;
}

// Gives the one thing that Gloo's group keeps to itself: its connections, whose closing is what ends a running operation.
class GlooProcessGroup : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;
  void CloseConnections() {
    for (auto& context : contexts_) context->closeConnections();
  }
};

std::string Describe(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), "[", absl::StrJoin(tensor.sizes(), ", "), "]",
                      tensor.is_contiguous() ? "" : " (not contiguous)");
}

class GlooGroup : public Group {
 public:
  explicit GlooGroup(GroupOptions options) : options_(std::move(options)), state_(std::make_shared<State>()) {}

  absl::Status Start(Rendezvous* rendezvous, absl::Time deadline) {
    try {
      const auto timeout = Left(deadline);
      auto gloo = c10d::ProcessGroupGloo::Options::create(timeout);
      gloo->devices = {DeviceOf(options_.host)};
      gloo->threads = 1;
      const std::string prefix = absl::StrCat("group/", options_.generation, "/", options_.name, "/");
      group_ = c10::make_intrusive<GlooProcessGroup>(c10::make_intrusive<StreamStore>(rendezvous, prefix, timeout),
                                                     options_.rank, options_.size, gloo);
    } catch (...) {
      return FromException(options_.name, std::current_exception());
    }
    return absl::OkStatus();
  }

  ~GlooGroup() override {
    Abort(absl::CancelledError("the group was destroyed"));
    bool running;
    {
      absl::MutexLock lock(&state_->mutex);
      running = state_->running > 0;
    }
    if (!running || group_ == nullptr) return;
    // Gloo's destructor joins its thread, and nothing but its timeout ends a wait of that thread.
    try {
      std::thread([group = std::move(group_)]() mutable { group.reset(); }).detach();
    } catch (const std::system_error&) {
      // Without a thread left the destructor waits after all.
    }
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const std::string& name() const override { return options_.name; }
  std::string transport() const override { return "gloo"; }

  absl::Status AllGather(const at::Tensor& input, at::Tensor& output, absl::Time deadline) override {
    if (output.numel() != input.numel() * size() || output.dim() != input.dim() + 1 || output.size(0) != size() ||
        output.scalar_type() != input.scalar_type() || !input.is_contiguous() || !output.is_contiguous()) {
      return Invalid("all-gather", input, output);
    }
    return Run("all-gather", deadline, [&] {
      // As bytes, because Gloo does not know every dtype.
      at::Tensor from = input.detach().view({-1}).view(at::kByte);
      at::Tensor to = output.detach().view({-1}).view(at::kByte);
      return group_->_allgather_base(to, from);
    });
  }

  absl::Status AllReduceSum(at::Tensor& tensor, absl::Time deadline) override {
    if (!tensor.is_contiguous()) return Invalid("all-reduce", tensor, tensor);
    return Run("all-reduce", deadline, [&] {
      std::vector<at::Tensor> tensors = {tensor.detach()};
      return group_->allreduce(tensors);
    });
  }

  absl::Status AllReduceOrdered(at::Tensor& tensor, absl::Time deadline) override {
    if (!tensor.is_contiguous()) return Invalid("ordered all-reduce", tensor, tensor);
    if (tensor.numel() == 0) return Barrier(deadline);
    try {
      at::Tensor flat = tensor.detach().view({-1});
      const int64_t step = std::min(flat.numel(), kGatherPieceBytes / static_cast<int64_t>(flat.element_size()));
      const at::Tensor gathered = at::empty({size() * step}, flat.options());
      for (int64_t begin = 0; begin < flat.numel(); begin += step) {
        const int64_t count = std::min(step, flat.numel() - begin);
        at::Tensor piece = flat.narrow(0, begin, count);
        at::Tensor all = gathered.narrow(0, 0, size() * count).view({size(), count});
        MOONPIPE_RETURN_IF_ERROR(AllGather(piece, all, deadline));
        for (int64_t stride = 1; stride < size(); stride *= 2) {
          for (int64_t left = 0; left + stride < size(); left += 2 * stride) all[left].add_(all[left + stride]);
        }
        piece.copy_(all[0]);
      }
    } catch (...) {
      return Fail(FromException(options_.name, std::current_exception()));
    }
    return absl::OkStatus();
  }

  absl::Status ReduceScatterSum(const at::Tensor& input, at::Tensor& output, absl::Time deadline) override {
    if (input.numel() != output.numel() * size() || output.scalar_type() != input.scalar_type() || !input.is_contiguous() ||
        !output.is_contiguous()) {
      return Invalid("reduce-scatter", input, output);
    }
    // What Gloo's group does itself, but its handle is not complete before it is waited on, which no abort could end.
    at::Tensor sum;
    MOONPIPE_RETURN_IF_ERROR(Run("reduce-scatter", deadline, [&] {
      sum = input.detach().clone();
      std::vector<at::Tensor> tensors = {sum};
      return group_->allreduce(tensors);
    }));
    try {
      output.detach().view({-1}).copy_(sum.view({size(), -1})[rank()]);
    } catch (...) {
      return Fail(FromException(options_.name, std::current_exception()));
    }
    return absl::OkStatus();
  }

  absl::Status Barrier(absl::Time deadline) override {
    return Run("barrier", deadline, [&] { return group_->barrier(); });
  }

  void Abort(const absl::Status& reason) override {
    (void)Fail(Annotate(reason.ok() ? absl::AbortedError("aborted") : reason, absl::StrCat("group ", options_.name)));
  }

 private:
  // Shared with the callbacks of operations that may outlive a wait.
  struct State {
    absl::Mutex mutex;
    absl::Status failure ABSL_GUARDED_BY(mutex);
    // Operations that Gloo's thread has not ended.
    int running ABSL_GUARDED_BY(mutex) = 0;
  };

  absl::Status Invalid(absl::string_view operation, const at::Tensor& input, const at::Tensor& output) const {
    return absl::InvalidArgumentError(absl::StrCat("group ", options_.name, " of ", size(), ": ", operation, " of ",
                                                   Describe(input), " into ", Describe(output), " does not fit"));
  }

  // Returns the first failure, which may be an earlier one.
  absl::Status Fail(const absl::Status& failure) {
    {
      absl::MutexLock lock(&state_->mutex);
      if (!state_->failure.ok()) return state_->failure;
      state_->failure = failure;
    }
    if (group_ != nullptr) {
      try {
        group_->CloseConnections();
      } catch (...) {
        // The connections may be broken already; the group is dead in either case.
      }
    }
    return failure;
  }

  template <typename Begin>
  absl::Status Run(absl::string_view operation, absl::Time deadline, const Begin& begin) {
    const absl::Time started = absl::Now();
    try {
      {
        absl::MutexLock lock(&state_->mutex);
        if (!state_->failure.ok()) return state_->failure;
      }
      // So that Gloo's own thread gives up soon after this call does.
      group_->setTimeout(Left(deadline));
      const c10::intrusive_ptr<c10d::Work> work = begin();
      const auto done = std::make_shared<bool>(false);
      {
        absl::MutexLock lock(&state_->mutex);
        ++state_->running;
      }
      work->getFuture()->addCallback([state = state_, done](c10::ivalue::Future&) {
        absl::MutexLock lock(&state->mutex);
        *done = true;
        --state->running;
      });
      absl::ReleasableMutexLock lock(&state_->mutex);
      const auto ended = [&] { return *done || !state_->failure.ok(); };
      state_->mutex.AwaitWithDeadline(absl::Condition(&ended), deadline);
      if (!state_->failure.ok()) return state_->failure;
      const bool in_time = *done;
      lock.Release();
      if (!in_time) {
        return Fail(absl::DeadlineExceededError(
            absl::StrCat("group ", options_.name, ": waited ",
                         absl::FormatDuration(absl::Trunc(absl::Now() - started, absl::Milliseconds(1))), " for ", operation,
                         " as member ", rank(), " of ", size())));
      }
      if (work->getFuture()->hasError()) {
        return Fail(Annotate(FromException(options_.name, work->getFuture()->exception_ptr()), operation));
      }
      return absl::OkStatus();
    } catch (...) {
      return Fail(Annotate(FromException(options_.name, std::current_exception()), operation));
    }
  }

  const GroupOptions options_;
  const std::shared_ptr<State> state_;
  c10::intrusive_ptr<GlooProcessGroup> group_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Group>> MakeGlooGroup(const GroupOptions& options, Rendezvous* rendezvous,
                                                     absl::Time deadline) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", options.name, ": rank ", options.rank, " is not one of ", options.size, " members"));
  }
  auto group = std::make_unique<GlooGroup>(options);
  MOONPIPE_RETURN_IF_ERROR(group->Start(rendezvous, deadline));
  return group;
}

}  // namespace moonpipe
