#include "services/coordinator/worker_hub.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "moonpipe/base/logging.h"

namespace moonpipe {

using worker::v1::ConnectRequest;
using worker::v1::ConnectResponse;

namespace {

// A worker sends a handful of events a step; a full queue means that the run's thread is stuck, and then the worker is dropped.
constexpr size_t kEventCapacity = 1 << 16;

std::string RoleName(common::v1::WorkerRole role, uint32_t ordinal) {
  switch (role) {
    case common::v1::WORKER_ROLE_DATALOADER:
      return "dataloader";
    case common::v1::WORKER_ROLE_VISION_ENCODER:
      return "vision encoder";
    case common::v1::WORKER_ROLE_DECODER_STAGE:
      return absl::StrCat("decoder stage ", ordinal);
    default:
      return "worker without a role";
  }
}

}  // namespace

std::string WorkerInfo::ToString() const {
  return absl::StrCat(RoleName(registration.role(), registration.ordinal()), " (worker ", id, ", pid ",
                      registration.process_id(), registration.host().empty() ? "" : " on ", registration.host(), ")");
}

// One worker's stream. Deletes itself when gRPC is done with it; the hub's map holds it only until then.
class WorkerHub::Stream : public grpc::ServerBidiReactor<ConnectRequest, ConnectResponse> {
 public:
  explicit Stream(WorkerHub* hub) : hub_(hub) { StartRead(&incoming_); }

  void Send(ConnectResponse command) {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    outgoing_.push_back(std::move(command));
    WriteNextLocked();
  }

  void End(const grpc::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    Finish(status);
  }

 private:
  void WriteNextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_ || outgoing_.empty()) return;
    writing_ = true;
    current_ = std::move(outgoing_.front());
    outgoing_.pop_front();
    StartWrite(&current_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (ok) WriteNextLocked();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      End(grpc::Status::OK);
      return;
    }
    if (worker_ == 0) {
      if (!incoming_.has_register_()) {
        End(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "the first message of a worker must be Register"));
        return;
      }
      absl::StatusOr<uint32_t> worker = hub_->Register(this, incoming_.register_());
      if (!worker.ok()) {
        End(grpc::Status(static_cast<grpc::StatusCode>(worker.status().code()), std::string(worker.status().message())));
        return;
      }
      worker_ = *worker;
    } else {
      hub_->Handle(worker_, std::move(incoming_));
      incoming_ = ConnectRequest();
    }
    StartRead(&incoming_);
  }

  void OnCancel() override { End(grpc::Status::CANCELLED); }

  void OnDone() override {
    if (worker_ != 0) hub_->Leave(worker_);
    delete this;
  }

  WorkerHub* const hub_;
  ConnectRequest incoming_;
  uint32_t worker_ = 0;  // touched by reads only, which gRPC gives one after another, and by OnDone after them
  absl::Mutex mutex_;
  ConnectResponse current_ ABSL_GUARDED_BY(mutex_);
  std::deque<ConnectResponse> outgoing_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

WorkerHub::WorkerHub(Options options) : options_(std::move(options)), events_(kEventCapacity) {}

WorkerHub::~WorkerHub() { Shutdown(); }

grpc::ServerBidiReactor<ConnectRequest, ConnectResponse>* WorkerHub::Connect(grpc::CallbackServerContext*) {
  return new Stream(this);
}

absl::StatusOr<uint32_t> WorkerHub::Register(Stream* stream, const worker::v1::Register& registration) {
  absl::MutexLock lock(&mutex_);
  if (shut_down_) return absl::UnavailableError("the coordinator is ending");
  if (registration.role() == common::v1::WORKER_ROLE_UNSPECIFIED) {
    return absl::InvalidArgumentError("Register names no role");
  }
  if (registration.proto_digest() != options_.proto_digest) {
    return absl::FailedPreconditionError(
        absl::StrCat(RoleName(registration.role(), registration.ordinal()), " was built from other protos (digest ",
                     registration.proto_digest().substr(0, 12), ") than the coordinator (", options_.proto_digest.substr(0, 12),
                     "); run services of one build"));
  }
  for (const auto& [id, entry] : workers_) {
    if (entry.info.registration.role() == registration.role() &&
        entry.info.registration.ordinal() == registration.ordinal()) {
      return absl::AlreadyExistsError(absl::StrCat("there is a ", entry.info.ToString(),
                                                   " already; give the second one another --ordinal"));
    }
  }
  Entry entry;
  entry.info.id = ++last_worker_;
  entry.info.registration = registration;
  entry.info.last_heard = absl::Now();
  entry.info.activity = "registered";
  entry.stream = stream;
  ConnectResponse welcome;
  welcome.mutable_welcome()->set_worker(entry.info.id);
  welcome.mutable_welcome()->set_heartbeat_seconds(absl::ToDoubleSeconds(options_.heartbeat_period));
  welcome.mutable_welcome()->set_silence_seconds(absl::ToDoubleSeconds(options_.silence));
  stream->Send(std::move(welcome));
  MP_LOG(INFO) << entry.info.ToString() << " registered";
  WorkerEvent event;
  event.worker = entry.info.id;
  *event.message.mutable_register_() = registration;
  (void)events_.Push(std::move(event), absl::InfinitePast());
  workers_.emplace(entry.info.id, std::move(entry));
  return last_worker_;
}

void WorkerHub::Handle(uint32_t worker, ConnectRequest message) {
  {
    absl::MutexLock lock(&mutex_);
    auto entry = workers_.find(worker);
    if (entry == workers_.end()) return;
    WorkerInfo& info = entry->second.info;
    info.last_heard = absl::Now();
    if (message.has_heartbeat()) {
      info.activity = message.heartbeat().activity();
      info.waiting_for = message.heartbeat().waiting_for();
      info.clock_offset = absl::FromUnixMicros(message.heartbeat().clock_us()) - info.last_heard;
      ConnectResponse reply;
      reply.mutable_heartbeat();
      entry->second.stream->Send(std::move(reply));
      return;
    }
    if (message.has_key_value()) {
      HandleKeyLocked(worker, message.key_value());
      return;
    }
  }
  WorkerEvent event;
  event.worker = worker;
  event.message = std::move(message);
  if (absl::Status pushed = events_.Push(std::move(event), absl::InfinitePast()); !pushed.ok()) {
    MP_LOG(ERROR) << "event of worker " << worker << " dropped: " << pushed.message();
  }
}

void WorkerHub::HandleKeyLocked(uint32_t worker, const worker::v1::KeyValueRequest& request) {
  if (request.generation() != generation_) return;  // of a plan that is over; the asker's wait ends with its stream
  if (request.has_value()) {
    keys_[request.key()] = request.value();
    auto waiting = waiters_.extract(request.key());
    if (waiting.empty()) return;
    for (const Waiter& waiter : waiting.mapped()) {
      auto entry = workers_.find(waiter.worker);
      if (entry == workers_.end()) continue;
      ConnectResponse reply;
      reply.mutable_key_value()->set_id(waiter.request);
      reply.mutable_key_value()->set_value(request.value());
      entry->second.stream->Send(std::move(reply));
    }
    return;
  }
  auto value = keys_.find(request.key());
  if (value == keys_.end()) {
    waiters_[request.key()].push_back({worker, request.id()});
    return;
  }
  ConnectResponse reply;
  reply.mutable_key_value()->set_id(request.id());
  reply.mutable_key_value()->set_value(value->second);
  workers_[worker].stream->Send(std::move(reply));
}

void WorkerHub::Leave(uint32_t worker) {
  absl::MutexLock lock(&mutex_);
  auto entry = workers_.find(worker);
  if (entry == workers_.end()) return;
  MP_LOG(INFO) << entry->second.info.ToString() << " left";
  workers_.erase(entry);
  WorkerEvent event;
  event.worker = worker;
  event.disconnected = true;
  (void)events_.Push(std::move(event), absl::InfinitePast());
}

absl::StatusOr<WorkerEvent> WorkerHub::Next(absl::Time deadline) { return events_.Pop(deadline); }

absl::Status WorkerHub::Send(uint32_t worker, ConnectResponse command) {
  absl::MutexLock lock(&mutex_);
  auto entry = workers_.find(worker);
  if (entry == workers_.end()) return absl::NotFoundError(absl::StrCat("worker ", worker, " is gone"));
  entry->second.stream->Send(std::move(command));
  return absl::OkStatus();
}

std::vector<WorkerInfo> WorkerHub::Workers() const {
  absl::MutexLock lock(&mutex_);
  std::vector<WorkerInfo> workers;
  for (const auto& [id, entry] : workers_) workers.push_back(entry.info);
  return workers;
}

void WorkerHub::BeginGeneration(uint64_t generation) {
  absl::MutexLock lock(&mutex_);
  generation_ = generation;
  keys_.clear();
  waiters_.clear();
}

void WorkerHub::Shutdown() {
  absl::MutexLock lock(&mutex_);
  shut_down_ = true;
  for (auto& [id, entry] : workers_) {
    entry.stream->End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the coordinator is ending"));
  }
}

}  // namespace moonpipe
