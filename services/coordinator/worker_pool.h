// The workers of one plan: what they have said, and whether all of them are still there. Every wait of a run goes through Await,
// which ends at once when a worker fails, falls silent or leaves, with one message that names the service, the edge, the
// microbatch and what to do.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "services/coordinator/worker_hub.h"

namespace moonpipe {

class WorkerPool {
 public:
  struct Options {
    uint64_t generation = 0;
    absl::Duration heartbeat_timeout = absl::Seconds(10);
    // After the first sign of a failure, how long others are listened to, so that the message can tell cause from effect.
    absl::Duration gather = absl::Milliseconds(400);
    // The edges of each worker, named when nobody at their other ends can tell where it stood.
    std::map<uint32_t, std::vector<std::string>> edges;
  };
  // `hub` must outlive the pool. `members` are the workers of the plan.
  WorkerPool(WorkerHub* hub, std::vector<WorkerInfo> members, Options options);

  // Blocks until `done` says so; `done` is asked after every event. `what` completes "while ...". UNAVAILABLE for a worker that left
  // or fell silent, the worker's own code for a failure it reported, DEADLINE_EXCEEDED at the deadline with the workers that are
  // missing in `missing()`.
  absl::Status Await(const std::string& what, absl::Time deadline, const std::function<bool()>& done,
                     const std::function<std::vector<uint32_t>()>& missing);

  void Send(uint32_t worker, worker::v1::ConnectResponse command);
  void SendAll(const worker::v1::ConnectResponse& command);

  const std::vector<WorkerInfo>& members() const { return members_; }
  // With the latest heartbeat.
  std::optional<WorkerInfo> Latest(uint32_t worker) const;
  std::string NameOf(uint32_t worker) const;

  // What was said, of this generation only; older messages are dropped.
  std::map<uint32_t, worker::v1::PlanReady> ready;
  std::map<uint64_t, worker::v1::PublishManifest> manifests;                // by step
  std::map<uint64_t, std::map<uint32_t, worker::v1::StepReport>> reports;   // by step and worker
  std::map<uint64_t, std::map<uint32_t, bool>> committed;                   // by step and worker
  std::map<uint64_t, std::map<uint32_t, worker::v1::ShardsSaved>> saved;    // by step and worker

 private:
  struct Sign {
    enum class Kind { kLeft, kSilent, kReported } kind;
    uint32_t worker;
    worker::v1::WorkerFailure failure;  // for kReported
  };
  // True if the event was a sign of failure.
  bool Take(WorkerEvent event, std::vector<Sign>& signs);
  void FindSilent(std::vector<Sign>& signs) const;
  absl::Status Explain(const std::string& what, std::vector<Sign> signs) const;

  WorkerHub* const hub_;
  const std::vector<WorkerInfo> members_;
  const Options options_;
};

}  // namespace moonpipe
