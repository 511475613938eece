#include "services/coordinator/run_files.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "nlohmann/json.hpp"

namespace moonpipe {

using nlohmann::ordered_json;

void MetricsLog::Append(const cluster::v1::StepEvent& step) {
  ordered_json line;
  line["step"] = step.step();
  line["loss"] = step.loss();
  line["grad_norm"] = step.grad_norm();
  line["learning_rate"] = step.learning_rate();
  line["tokens"] = step.tokens();
  line["trained_labels"] = step.trained_labels();
  line["images"] = step.images();
  line["samples"] = step.samples();
  line["seconds"] = step.seconds();
  line["model_flops"] = step.model_flops();
  if (step.has_mfu()) line["mfu"] = step.mfu();
  line["bubble_ratio"] = step.bubble_ratio();
  line["peak_memory_bytes"] = step.peak_memory_bytes();
  if (!step.skip_reason().empty()) line["skip_reason"] = step.skip_reason();
  file_ << line.dump() << '\n' << std::flush;
}

void Trace::Add(uint64_t step, const std::string& service, absl::Duration clock_offset, const worker::v1::StepReport& report) {
  Row row{step, service, absl::ToInt64Microseconds(clock_offset), {}};
  row.timings.assign(report.timings().begin(), report.timings().end());
  rows_.push_back(std::move(row));
  while (!rows_.empty() && rows_.front().step + limit_ <= step) rows_.pop_front();
}

std::string Trace::ToJson() const {
  std::set<std::string> services;
  int64_t start = INT64_MAX;
  for (const Row& row : rows_) {
    services.insert(row.service);
    for (const auto& timing : row.timings) start = std::min(start, timing.begin_us() - row.offset_us);
  }
  ordered_json events = ordered_json::array();
  int64_t number = 0;
  std::map<std::string, int64_t> thread;
  for (const std::string& service : services) {
    thread[service] = ++number;
    events.push_back({{"ph", "M"}, {"pid", 1}, {"tid", number}, {"name", "thread_name"}, {"args", {{"name", service}}}});
  }
  for (const Row& row : rows_) {
    for (const auto& timing : row.timings) {
      const bool waits = timing.action().find('R') != std::string::npos && timing.action().find("RP") == std::string::npos;
      const bool sends = timing.action().find('S') != std::string::npos;
      events.push_back({{"ph", "X"},
                        {"pid", 1},
                        {"tid", thread[row.service]},
                        {"name", timing.action()},
                        {"cat", waits ? "receive" : sends ? "send" : "compute"},
                        {"ts", timing.begin_us() - row.offset_us - start},
                        {"dur", timing.end_us() - timing.begin_us()},
                        {"args", {{"step", row.step}}}});
    }
  }
  return ordered_json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}.dump() + "\n";
}

std::string RunReport::ToJson() const {
  ordered_json report;
  report["steps"] = steps;
  report["training_seconds"] = training_seconds;
  report["wall_seconds"] = wall_seconds;
  report["tokens_per_second"] = tokens_per_second;
  report["images_per_second"] = images_per_second;
  report["final_loss"] = final_loss;
  report["mfu"] = mfu < 0 ? ordered_json() : ordered_json(mfu);
  ordered_json controls;
  for (size_t i = 0; i < evals.size(); ++i) {
    const cluster::v1::EvalResult& eval = evals[i];
    const std::string set = absl::StrReplaceAll(eval.set(), {{"-", "_"}});
    const double accuracy = eval.samples() == 0 ? 0 : static_cast<double>(eval.correct()) / static_cast<double>(eval.samples());
    if (eval.control() == "none") {
      report[set] = accuracy;
      continue;
    }
    ordered_json& control = controls[eval.control()][set];
    control["accuracy"] = accuracy;
    // How many answers the control changed against the plain ones of the same set.
    for (const cluster::v1::EvalResult& plain : evals) {
      if (plain.set() != eval.set() || plain.control() != "none" || plain.answers_size() != eval.answers_size()) continue;
      int changed = 0;
      for (int s = 0; s < eval.answers_size(); ++s) changed += plain.answers(s) != eval.answers(s);
      control["changed"] = eval.answers_size() == 0 ? 0.0 : static_cast<double>(changed) / eval.answers_size();
    }
  }
  report["controls"] = controls;
  return report.dump(2) + "\n";
}

}  // namespace moonpipe
