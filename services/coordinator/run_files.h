// What a run leaves in its folder beside journal and checkpoints: who serves it in services.json, one line a step in metrics.jsonl, a
// trace of its last steps for chrome://tracing and Perfetto, and the report.
#pragma once

#include <deque>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "moonpipe/cluster/v1/training_run.pb.h"
#include "moonpipe/worker/v1/worker_service.pb.h"

namespace moonpipe {

// A process that has a part in the run.
struct ServiceEntry {
  std::string name;      // coordinator, dataloader, vision-encoder, decoder-stage-0
  std::string role;      // the same without the stage's number
  uint32_t ordinal = 0;  // the stage's number
  std::string address;          // host:port of its gRPC services
  std::string metrics_address;  // host:port of its metrics page
  std::string host;
  uint64_t process_id = 0;
};
// services.json: an array of objects with the fields above, `pid` for the last.
std::string ServicesJson(const std::vector<ServiceEntry>& services);

// Appends one JSON object a step.
class MetricsLog {
 public:
  explicit MetricsLog(const std::string& path) : file_(path, std::ios::app) {}
  void Append(const cluster::v1::StepEvent& step);

 private:
  std::ofstream file_;
};

// Keeps the timings of the last steps and writes them as a Chrome trace with one row a service.
class Trace {
 public:
  explicit Trace(size_t steps) : limit_(steps) {}
  // From the start of a step to its commit, as the coordinator sees it: a row of its own.
  void AddStep(uint64_t step, absl::Time begin, absl::Time end);
  // `clock_offset` is the worker's clock minus ours; `service` names the row.
  void Add(uint64_t step, const std::string& service, absl::Duration clock_offset, const worker::v1::StepReport& report);
  // The JSON text: complete events ("ph": "X") in microseconds, named by their action.
  std::string ToJson() const;

 private:
  struct Row {
    uint64_t step;
    std::string service;
    int64_t offset_us;
    std::vector<worker::v1::ActionTiming> timings;
  };
  const size_t limit_;
  std::deque<Row> rows_;
};

// report.json of a finished run.
struct RunReport {
  uint64_t steps = 0;
  double training_seconds = 0;
  double wall_seconds = 0;
  double tokens_per_second = 0;
  double images_per_second = 0;
  double final_loss = 0;
  double mfu = -1;  // negative: unknown, written as null
  std::vector<cluster::v1::EvalResult> evals;
  std::string ToJson() const;
};

}  // namespace moonpipe
