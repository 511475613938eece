// What a run leaves in its folder beside journal and checkpoints: one line a step in metrics.jsonl, a trace of its last steps for
// chrome://tracing and Perfetto, and the report.
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
  // `clock_offset` is the worker's clock minus ours.
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
  std::vector<std::vector<std::string>> eval_references;  // beside evals
  std::string ToJson() const;
};

}  // namespace moonpipe
