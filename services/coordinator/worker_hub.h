// The coordinator's end of all worker streams: who is there, what they say, and the rendezvous of their edges. An adapter only:
// it decides nothing. Events go to one queue that the run's thread reads; Send never blocks.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "moonpipe/base/bounded_queue.h"
#include "moonpipe/worker/v1/worker_service.grpc.pb.h"

namespace moonpipe {

// A registered worker.
struct WorkerInfo {
  uint32_t id = 0;
  worker::v1::Register registration;
  absl::Time last_heard;
  std::string activity;
  std::string waiting_for;
  // Its clock minus ours at the last heartbeat.
  absl::Duration clock_offset;

  // "decoder stage 1 (worker 3, pid 4711)"
  std::string ToString() const;
};

// A message of a worker, or the end of its stream.
struct WorkerEvent {
  uint32_t worker = 0;
  bool disconnected = false;
  worker::v1::ConnectRequest message;
};

class WorkerHub : public worker::v1::WorkerService::CallbackService {
 public:
  struct Options {
    // Protos that a worker must have been built from.
    std::string proto_digest;
    absl::Duration heartbeat_period = absl::Seconds(1);
    // Silence after which either side takes the other for dead.
    absl::Duration silence = absl::Seconds(10);
  };
  explicit WorkerHub(Options options);
  ~WorkerHub() override;

  grpc::ServerBidiReactor<worker::v1::ConnectRequest, worker::v1::ConnectResponse>* Connect(
      grpc::CallbackServerContext* context) override;

  // The next event; heartbeats and rendezvous are handled inside and give none. DEADLINE_EXCEEDED.
  absl::StatusOr<WorkerEvent> Next(absl::Time deadline);
  // Enqueues a command. NOT_FOUND when the worker is gone.
  absl::Status Send(uint32_t worker, worker::v1::ConnectResponse command);
  // All workers that are connected now, by id.
  std::vector<WorkerInfo> Workers() const;
  // Forgets the rendezvous keys of older generations and refuses them from now on.
  void BeginGeneration(uint64_t generation);
  // Ends every stream; new workers are refused. For the end of the process.
  void Shutdown();

 private:
  class Stream;
  struct Entry {
    WorkerInfo info;
    Stream* stream = nullptr;
  };
  struct Waiter {
    uint32_t worker;
    uint64_t request;
  };

  // INVALID_ARGUMENT, FAILED_PRECONDITION or ALREADY_EXISTS as for CoordinatorClient::Connect.
  absl::StatusOr<uint32_t> Register(Stream* stream, const worker::v1::Register& registration);
  void Handle(uint32_t worker, worker::v1::ConnectRequest message);
  void Leave(uint32_t worker);
  void HandleKeyLocked(uint32_t worker, const worker::v1::KeyValueRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  BoundedQueue<WorkerEvent> events_;
  mutable absl::Mutex mutex_;
  std::map<uint32_t, Entry> workers_ ABSL_GUARDED_BY(mutex_);
  uint32_t last_worker_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::string> keys_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<Waiter>> waiters_ ABSL_GUARDED_BY(mutex_);
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace moonpipe
