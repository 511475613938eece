#include "services/coordinator/run_files.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "moonpipe/pipeline/schedule.h"
#include "nlohmann/json.hpp"

namespace moonpipe {

using nlohmann::ordered_json;

namespace {

constexpr char kCoordinatorRow[] = "coordinator";

// Coordinator, encoder, then the stages by number.
std::tuple<int, size_t, std::string> RowOrder(const std::string& service) {
  const int rank = service == kCoordinatorRow ? 0 : absl::StartsWith(service, "decoder") ? 2 : 1;
  // A longer name is a larger number.
  return {rank, service.size(), service};
}

std::string Category(const std::string& service, const std::string& name) {
  if (service == kCoordinatorRow) return "step";
  const absl::StatusOr<Action> action = ParseAction(name);
  if (!action.ok()) return "other";
  switch (action->type) {
    case ActionType::kForward:
    case ActionType::kBackward:
      return "compute";
    case ActionType::kReceiveActivation:
    case ActionType::kReceiveGradient:
    case ActionType::kReceiveFeatures:
    case ActionType::kReceiveFeatureGradient:
      return "receive";
    default:
      return "send";
  }
}

}  // namespace

std::string ServicesJson(const std::vector<ServiceEntry>& services) {
  ordered_json list = ordered_json::array();
  for (const ServiceEntry& service : services) {
    list.push_back({{"name", service.name},
                    {"role", service.role},
                    {"ordinal", service.ordinal},
                    {"address", service.address},
                    {"metrics_address", service.metrics_address},
                    {"host", service.host},
                    {"pid", service.process_id}});
  }
  return list.dump(2) + "\n";
}

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

void Trace::AddStep(uint64_t step, absl::Time begin, absl::Time end) {
  worker::v1::StepReport report;
  worker::v1::ActionTiming& timing = *report.add_timings();
  timing.set_action(absl::StrCat("step ", step));
  timing.set_begin_us(absl::ToUnixMicros(begin));
  timing.set_end_us(absl::ToUnixMicros(end));
  Add(step, kCoordinatorRow, absl::ZeroDuration(), report);
}

void Trace::Add(uint64_t step, const std::string& service, absl::Duration clock_offset, const worker::v1::StepReport& report) {
  Row row{step, service, absl::ToInt64Microseconds(clock_offset), {}};
  row.timings.assign(report.timings().begin(), report.timings().end());
  rows_.push_back(std::move(row));
  while (!rows_.empty() && rows_.front().step + limit_ <= step) rows_.pop_front();
}

std::string Trace::ToJson() const {
  // Rows in the order in which a microbatch passes the services.
  const auto before = [](const std::string& a, const std::string& b) { return RowOrder(a) < RowOrder(b); };
  std::set<std::string, decltype(before)> services(before);
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
    events.push_back({{"ph", "M"}, {"pid", 1}, {"tid", number}, {"name", "thread_sort_index"}, {"args", {{"sort_index", number}}}});
  }
  for (const Row& row : rows_) {
    for (const auto& timing : row.timings) {
      events.push_back({{"ph", "X"},
                        {"pid", 1},
                        {"tid", thread[row.service]},
                        {"name", timing.action()},
                        {"cat", Category(row.service, timing.action())},
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
