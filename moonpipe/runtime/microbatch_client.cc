#include "moonpipe/runtime/microbatch_client.h"

#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "grpcpp/client_context.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/v1/data_service.grpc.pb.h"

namespace moonpipe {

using data::v1::MicrobatchView;

namespace {

std::string ViewName(MicrobatchView view) {
  return std::string(absl::StripPrefix(data::v1::MicrobatchView_Name(view), "MICROBATCH_VIEW_"));
}

}  // namespace

class MicrobatchClient::Impl {
 public:
  explicit Impl(Options options)
      : options_(std::move(options)), stub_(data::v1::DataService::NewStub(options_.channel)), thread_([this] { Run(); }) {}

  ~Impl() {
    Abort(absl::CancelledError("the worker ends"));
    thread_.join();
  }

  void Prefetch(uint64_t step, std::vector<Wanted> wanted, absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    step_ = step;
    deadline_ = deadline;
    fetched_.clear();
    wanted_.assign(wanted.begin(), wanted.end());
  }

  absl::StatusOr<std::string> Take(uint32_t microbatch, MicrobatchView view, absl::Time deadline) {
    const Key key{microbatch, view};
    absl::MutexLock lock(&mutex_);
    auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return fetched_.contains(key) || !aborted_.ok(); };
    if (!mutex_.AwaitWithDeadline(absl::Condition(&there), deadline)) {
      return absl::DeadlineExceededError(absl::StrCat("the dataloader did not send ", ViewName(view), " of step ", step_,
                                                      " microbatch ", microbatch, " in time"));
    }
    auto found = fetched_.extract(key);
    if (found.empty()) return aborted_;
    return std::move(found.mapped());
  }

  void Abort(const absl::Status& reason) {
    absl::MutexLock lock(&mutex_);
    if (aborted_.ok()) aborted_ = reason;
    if (context_ != nullptr) context_->TryCancel();
  }

 private:
  using Key = std::pair<uint32_t, MicrobatchView>;

  void Run() {
    while (true) {
      Wanted next;
      uint64_t step;
      absl::Time deadline;
      grpc::ClientContext context;
      {
        absl::MutexLock lock(&mutex_);
        auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !wanted_.empty() || !aborted_.ok(); };
        mutex_.Await(absl::Condition(&work));
        if (!aborted_.ok()) return;
        next = wanted_.front();
        wanted_.pop_front();
        step = step_;
        deadline = deadline_;
        context_ = &context;
      }
      context.set_deadline(absl::ToChronoTime(deadline));
      absl::StatusOr<std::string> bytes = Fetch(context, step, next);
      absl::MutexLock lock(&mutex_);
      context_ = nullptr;
      if (step == step_) fetched_.insert_or_assign(Key{next.microbatch, next.view}, std::move(bytes));
    }
  }

  absl::StatusOr<std::string> Fetch(grpc::ClientContext& context, uint64_t step, const Wanted& wanted) {
    data::v1::FetchMicrobatchRequest request;
    request.set_generation(options_.generation);
    request.set_step(step);
    request.set_microbatch(wanted.microbatch);
    request.set_view(wanted.view);
    request.set_access_token(options_.access_token);
    auto reader = stub_->FetchMicrobatch(&context, request);
    const std::string what = absl::StrCat("fetching ", ViewName(wanted.view), " of step ", step, " microbatch ", wanted.microbatch,
                                          " from the dataloader");
    data::v1::FetchMicrobatchResponse piece;
    std::string bytes;
    uint64_t total = 0;
    bool first = true;
    while (reader->Read(&piece)) {
      if (first) {
        total = piece.total_bytes();
        if (total > options_.max_view_bytes) {
          context.TryCancel();
          return absl::ResourceExhaustedError(
              absl::StrCat(what, ": ", total, " bytes are over the limit of ", options_.max_view_bytes));
        }
        bytes.reserve(total);
        first = false;
      }
      bytes.append(piece.chunk());
    }
    const grpc::Status status = reader->Finish();
    if (!status.ok()) {
      return absl::Status(static_cast<absl::StatusCode>(status.error_code()), absl::StrCat(what, ": ", status.error_message()));
    }
    if (bytes.size() != total) {
      return absl::DataLossError(absl::StrCat(what, ": ", bytes.size(), " bytes came, ", total, " were announced"));
    }
    return bytes;
  }

  const Options options_;
  std::unique_ptr<data::v1::DataService::Stub> stub_;
  absl::Mutex mutex_;
  uint64_t step_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_);
  std::deque<Wanted> wanted_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, absl::StatusOr<std::string>> fetched_ ABSL_GUARDED_BY(mutex_);
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::thread thread_;
};

MicrobatchClient::MicrobatchClient(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {}
MicrobatchClient::~MicrobatchClient() = default;
void MicrobatchClient::Prefetch(uint64_t step, std::vector<Wanted> wanted, absl::Time deadline) {
  impl_->Prefetch(step, std::move(wanted), deadline);
}
absl::StatusOr<std::string> MicrobatchClient::Take(uint32_t microbatch, MicrobatchView view, absl::Time deadline) {
  return impl_->Take(microbatch, view, deadline);
}
void MicrobatchClient::Abort(const absl::Status& reason) { impl_->Abort(reason); }

}  // namespace moonpipe
