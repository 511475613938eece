#include "moonpipe/runtime/coordinator_client.h"

#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "moonpipe/base/bounded_queue.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/worker/v1/worker_service.grpc.pb.h"

namespace moonpipe {

using worker::v1::ConnectRequest;
using worker::v1::ConnectResponse;
using worker::v1::WorkerService;

namespace {
// Far more than the coordinator ever sends ahead: two steps' commands and a save.
constexpr size_t kCommandCapacity = 1024;
}  // namespace

class CoordinatorClient::Impl : public grpc::ClientBidiReactor<ConnectRequest, ConnectResponse> {
 public:
  explicit Impl(std::shared_ptr<grpc::Channel> channel)
      : stub_(WorkerService::NewStub(std::move(channel))), commands_(kCommandCapacity) {}

  void Start() {
    context_.set_wait_for_ready(true);
    stub_->async()->Connect(&context_, this);
    StartRead(&incoming_);
    // The hold lets Send start writes from any thread until the client ends.
    AddHold();
    StartCall();
  }

  void Send(ConnectRequest event) {
    absl::MutexLock lock(&mutex_);
    if (broken_) return;
    outgoing_.push_back(std::move(event));
    WriteNextLocked();
  }

  absl::StatusOr<ConnectResponse> Next(absl::Time deadline) { return commands_.Pop(deadline); }

  void SetActivity(std::string activity, std::string waiting_for) {
    absl::MutexLock lock(&activity_mutex_);
    activity_ = std::move(activity);
    waiting_for_ = std::move(waiting_for);
  }

  void OnInterrupt(std::function<void(const absl::Status&)> callback) {
    absl::MutexLock lock(&mutex_);
    interrupt_ = std::move(callback);
  }

  void StartHeartbeats(absl::Duration period, absl::Duration silence) {
    heartbeat_thread_ = std::thread([this, period, silence] {
      while (true) {
        bool silent;
        {
          absl::MutexLock lock(&mutex_);
          if (mutex_.AwaitWithTimeout(absl::Condition(this, &Impl::EndingLocked), period)) return;
          silent = absl::Now() - last_heard_ > silence;
        }
        if (silent) {
          const std::string message =
              absl::StrCat("the coordinator has been silent for more than ", absl::FormatDuration(silence),
                           "; is its process stopped or its machine gone?");
          MP_LOG(ERROR) << message;
          // A cancelled stream may take a while to end when the peer is silent, so waits are ended here.
          commands_.Close(absl::UnavailableError(message));
          Interrupt(absl::UnavailableError(message));
          context_.TryCancel();
          return;
        }
        ConnectRequest event;
        auto* heartbeat = event.mutable_heartbeat();
        {
          absl::MutexLock lock(&activity_mutex_);
          heartbeat->set_activity(activity_);
          heartbeat->set_waiting_for(waiting_for_);
        }
        heartbeat->set_clock_us(absl::ToUnixMicros(absl::Now()));
        Send(std::move(event));
      }
    });
  }

  // Ends the stream and waits for its last callback.
  void Stop() {
    {
      absl::MutexLock lock(&mutex_);
      ending_ = true;
    }
    if (heartbeat_thread_.joinable()) heartbeat_thread_.join();
    FlushAndFinish();
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&done_));
  }

  absl::Status SetKey(uint64_t generation, const std::string& key, const std::string& value) {
    ConnectRequest event;
    auto* request = event.mutable_key_value();
    request->set_generation(generation);
    request->set_key(key);
    request->set_value(value);
    Send(std::move(event));
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> GetKey(uint64_t generation, const std::string& key, absl::Time deadline) {
    uint64_t id;
    {
      absl::MutexLock lock(&mutex_);
      id = ++last_request_;
      replies_[id] = std::nullopt;
    }
    ConnectRequest event;
    auto* request = event.mutable_key_value();
    request->set_id(id);
    request->set_generation(generation);
    request->set_key(key);
    Send(std::move(event));
    absl::MutexLock lock(&mutex_);
    auto answered = [this, id]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return broken_ || replies_[id].has_value(); };
    mutex_.AwaitWithDeadline(absl::Condition(&answered), deadline);
    std::optional<std::string> value = std::move(replies_[id]);
    replies_.erase(id);
    if (value.has_value()) return *std::move(value);
    if (broken_) return absl::AbortedError(absl::StrCat("rendezvous on '", key, "' ended: the stream to the coordinator broke"));
    return absl::DeadlineExceededError(
        absl::StrCat("no worker published '", key, "' in time; is the peer that publishes it running?"));
  }

 private:
  bool EndingLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || broken_; }

  void WriteNextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || broken_ || outgoing_.empty()) return;
    writing_ = true;
    current_ = std::move(outgoing_.front());
    outgoing_.pop_front();
    StartWrite(&current_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) {
      outgoing_.clear();
      return;
    }
    WriteNextLocked();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Break();
      return;
    }
    if (incoming_.has_heartbeat()) {
      absl::MutexLock lock(&mutex_);
      last_heard_ = absl::Now();
    } else if (incoming_.has_key_value()) {
      absl::MutexLock lock(&mutex_);
      auto reply = replies_.find(incoming_.key_value().id());
      if (reply != replies_.end()) reply->second = std::move(*incoming_.mutable_key_value()->mutable_value());
    } else {
      const bool drain = incoming_.has_drain();
      const std::string reason = drain ? incoming_.drain().reason() : "";
      // The capacity is far above what the coordinator sends ahead; a full queue means that it misbehaves.
      if (!commands_.Push(std::move(incoming_), absl::InfinitePast()).ok()) {
        MP_LOG(ERROR) << "more than " << kCommandCapacity << " commands are waiting; leaving the stream";
        context_.TryCancel();
      }
      incoming_ = ConnectResponse();
      if (drain) Interrupt(absl::CancelledError(absl::StrCat("the coordinator drains this worker: ", reason)));
    }
    StartRead(&incoming_);
  }

  void Break() {
    const absl::Status reason = absl::UnavailableError("the stream to the coordinator broke");
    {
      absl::MutexLock lock(&mutex_);
      broken_ = true;
    }
    commands_.Close(reason);
    Interrupt(reason);
    RemoveHold();
  }

  void Interrupt(const absl::Status& reason) {
    std::function<void(const absl::Status&)> callback;
    {
      absl::MutexLock lock(&mutex_);
      callback = std::exchange(interrupt_, nullptr);
    }
    if (callback) callback(reason);
  }

  void OnDone(const grpc::Status& status) override {
    absl::MutexLock lock(&mutex_);
    if (!status.ok() && !ending_) {
      MP_LOG(WARNING) << "stream to the coordinator ended: " << status.error_message();
      final_ = absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    }
    done_ = true;
  }

  void FlushAndFinish() {
    // Give queued events (the last acknowledgement, a failure) a moment to leave before the stream is cancelled.
    {
      absl::MutexLock lock(&mutex_);
      auto flushed = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return broken_ || (!writing_ && outgoing_.empty()); };
      mutex_.AwaitWithTimeout(absl::Condition(&flushed), absl::Seconds(2));
    }
    context_.TryCancel();
  }

 public:
  // Why the stream ended; OK while it lasts.
  absl::Status final_status() {
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&done_), absl::Seconds(1));
    return final_;
  }

  uint32_t worker = 0;

 private:
  std::unique_ptr<WorkerService::Stub> stub_;
  grpc::ClientContext context_;
  ConnectResponse incoming_;
  BoundedQueue<ConnectResponse> commands_;

  absl::Mutex mutex_;
  ConnectRequest current_ ABSL_GUARDED_BY(mutex_);
  std::deque<ConnectRequest> outgoing_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status final_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_heard_ ABSL_GUARDED_BY(mutex_) = absl::Now();
  uint64_t last_request_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::optional<std::string>> replies_ ABSL_GUARDED_BY(mutex_);
  std::function<void(const absl::Status&)> interrupt_ ABSL_GUARDED_BY(mutex_);

  absl::Mutex activity_mutex_;
  std::string activity_ ABSL_GUARDED_BY(activity_mutex_) = "starting";
  std::string waiting_for_ ABSL_GUARDED_BY(activity_mutex_);
  std::thread heartbeat_thread_;
};

namespace {

class StreamRendezvous : public Rendezvous {
 public:
  using Setter = std::function<absl::Status(const std::string&, const std::string&)>;
  using Getter = std::function<absl::StatusOr<std::string>(const std::string&, absl::Time)>;
  StreamRendezvous(Setter set, Getter get) : set_(std::move(set)), get_(std::move(get)) {}
  absl::Status Set(const std::string& key, const std::string& value) override { return set_(key, value); }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override { return get_(key, deadline); }

 private:
  Setter set_;
  Getter get_;
};

}  // namespace

CoordinatorClient::CoordinatorClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

CoordinatorClient::~CoordinatorClient() { impl_->Stop(); }

absl::StatusOr<std::unique_ptr<CoordinatorClient>> CoordinatorClient::Connect(Options options) {
  auto impl = std::make_unique<Impl>(options.channel);
  impl->Start();
  ConnectRequest event;
  *event.mutable_register_() = options.registration;
  impl->Send(std::move(event));
  absl::StatusOr<ConnectResponse> welcome = impl->Next(absl::Now() + options.connect_timeout);
  absl::Status status = welcome.status();
  if (status.ok() && !welcome->has_welcome()) status = absl::InternalError("the coordinator's first message is no welcome");
  if (!status.ok()) {
    // The server's own reason says more than that the stream broke.
    if (absl::IsDeadlineExceeded(status)) {
      status = absl::UnavailableError(absl::StrCat("no coordinator answered within ",
                                                   absl::FormatDuration(options.connect_timeout),
                                                   "; check --coordinator and that it is running"));
    } else if (const absl::Status reason = impl->final_status(); !reason.ok()) {
      status = reason;
    }
    impl->Stop();
    return status;
  }
  impl->worker = welcome->welcome().worker();
  impl->StartHeartbeats(absl::Seconds(welcome->welcome().heartbeat_seconds()),
                        absl::Seconds(welcome->welcome().silence_seconds()));
  return std::unique_ptr<CoordinatorClient>(new CoordinatorClient(std::move(impl)));
}

uint32_t CoordinatorClient::worker() const { return impl_->worker; }
void CoordinatorClient::Send(ConnectRequest event) { impl_->Send(std::move(event)); }
absl::StatusOr<ConnectResponse> CoordinatorClient::Next(absl::Time deadline) { return impl_->Next(deadline); }
void CoordinatorClient::SetActivity(std::string activity, std::string waiting_for) {
  impl_->SetActivity(std::move(activity), std::move(waiting_for));
}
void CoordinatorClient::OnInterrupt(std::function<void(const absl::Status&)> callback) {
  impl_->OnInterrupt(std::move(callback));
}

std::unique_ptr<Rendezvous> CoordinatorClient::MakeRendezvous(uint64_t generation) {
  Impl* impl = impl_.get();
  return std::make_unique<StreamRendezvous>(
      [impl, generation](const std::string& key, const std::string& value) { return impl->SetKey(generation, key, value); },
      [impl, generation](const std::string& key, absl::Time deadline) { return impl->GetKey(generation, key, deadline); });
}

}  // namespace moonpipe
