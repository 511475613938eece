#include "moonpipe/runtime/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using cluster::v1::StepEvent;

constexpr int kUsualWidth = 100;
constexpr int kShortestBar = 10;
// Back to the first column, and the rest of the line erased.
constexpr char kEraseLine[] = "\r\x1b[K";

double TokensPerSecond(const StepEvent& event) {
  return event.seconds() > 0 ? static_cast<double>(event.tokens()) / event.seconds() : 0;
}

// Four decimals, or five significant digits where that would be 0.0000 or very long.
std::string FormatMeasure(double value) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const double size = std::fabs(value);
  if (size != 0 && (size < 1e-3 || size >= 1e5)) return absl::StrFormat("%.2e", value);
  return absl::StrFormat("%.4f", value);
}

std::string StepOf(const StepEvent& event) {
  const std::string total = absl::StrCat(event.total_steps());
  return absl::StrFormat("%*s/%s", static_cast<int>(total.size()), absl::StrCat(event.step()), total);
}

nlohmann::ordered_json NumberOrNull(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

// `text` in a column of `width`, cut where it is longer.
std::string Fit(std::string text, int width) {
  text.resize(std::min(text.size(), static_cast<size_t>(std::max(width, 0))));
  return text;
}

int TerminalWidth(int fd) {
  winsize size = {};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUsualWidth;
}

}  // namespace

std::string StepLine(const StepEvent& event) {
  std::string line = absl::StrCat("step: ", StepOf(event));
  if (event.skip_reason().empty()) {
    absl::StrAppendFormat(&line, "  loss: %8s  grad_norm: %8s", FormatMeasure(event.loss()),
                          FormatMeasure(event.grad_norm()));
  } else {
    absl::StrAppendFormat(&line, "  %-35s", absl::StrCat("skipped: ", event.skip_reason()));
  }
  const std::string mfu = event.has_mfu() ? absl::StrFormat("%5.2f%%", event.mfu() * 100) : "unknown";
  absl::StrAppendFormat(&line, "  tps: %7s  mfu: %7s  memory: %9s  bubble: %5.1f%%  eta: %s",
                        FormatCount(static_cast<uint64_t>(std::llround(TokensPerSecond(event)))), mfu,
                        FormatGiB(static_cast<double>(event.peak_memory_bytes())), event.bubble_ratio() * 100,
                        FormatDuration(event.eta_seconds()));
  return line;
}

std::string StepJson(const StepEvent& event) {
  nlohmann::ordered_json object;
  object["step"] = event.step();
  object["total_steps"] = event.total_steps();
  object["loss"] = NumberOrNull(event.loss());
  object["grad_norm"] = NumberOrNull(event.grad_norm());
  object["learning_rate"] = NumberOrNull(event.learning_rate());
  object["tokens"] = event.tokens();
  object["trained_labels"] = event.trained_labels();
  object["images"] = event.images();
  object["samples"] = event.samples();
  object["seconds"] = NumberOrNull(event.seconds());
  object["tokens_per_second"] = NumberOrNull(TokensPerSecond(event));
  object["model_flops"] = NumberOrNull(event.model_flops());
  object["mfu"] = event.has_mfu() ? NumberOrNull(event.mfu()) : nlohmann::ordered_json(nullptr);
  object["bubble_ratio"] = NumberOrNull(event.bubble_ratio());
  object["peak_memory_bytes"] = event.peak_memory_bytes();
  object["skip_reason"] =
      event.skip_reason().empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(event.skip_reason());
  object["eta_seconds"] = NumberOrNull(event.eta_seconds());
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string ProgressBar(const StepEvent& event, int width) {
  const double total = static_cast<double>(std::max<uint64_t>(event.total_steps(), 1));
  const double part = std::min(static_cast<double>(event.step()) / total, 1.0);
  const std::string before = absl::StrFormat("%3d%% ", static_cast<int>(part * 100));
  const std::string after = absl::StrCat(" ", event.step(), "/", event.total_steps(), "  loss ",
                                         FormatMeasure(event.loss()), "  eta ", FormatDuration(event.eta_seconds()));
  const int bar = width - static_cast<int>(before.size() + after.size()) - 2;
  if (bar < kShortestBar) return Fit(absl::StrCat(before, after.substr(1)), width);
  const int full = static_cast<int>(part * bar);
  std::string cells(static_cast<size_t>(full), '=');
  if (full < bar) cells += '>';
  cells.resize(static_cast<size_t>(bar), ' ');
  return absl::StrCat(before, "|", cells, "|", after);
}

std::string FormatCount(uint64_t count) {
  const std::string digits = absl::StrCat(count);
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped += ',';
    grouped += digits[i];
  }
  return grouped;
}

std::string FormatGiB(double bytes) { return absl::StrFormat("%.2fGiB", bytes / (1 << 30)); }

std::string FormatDuration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "unknown";
  const auto whole = static_cast<int64_t>(std::llround(std::min(seconds, 1e15)));
  const int64_t minutes = whole / 60, hours = whole / 3600, days = whole / 86400;
  if (whole < 60) return absl::StrCat(whole, "s");
  if (hours == 0) return absl::StrFormat("%dm %02ds", minutes, whole % 60);
  if (days == 0) return absl::StrFormat("%dh %02dm", hours, minutes % 60);
  return absl::StrFormat("%dd %02dh", days, hours % 24);
}

std::string FormatPlanSummary(const PlanSummary& plan) {
  std::string text = absl::StrCat("run         ", plan.run, "\nmodel       ", plan.model, "\n");
  uint64_t all = 0;
  std::vector<std::string> parts;
  for (const auto& [part, parameters] : plan.parameters) {
    all += parameters;
    parts.push_back(absl::StrCat(part, " ", FormatCount(parameters)));
  }
  absl::StrAppend(&text, "parameters  ", FormatCount(all), " (", absl::StrJoin(parts, ", "));
  if (plan.active_parameters > 0)
    absl::StrAppend(&text, "; ", FormatCount(plan.active_parameters), " active for a token");
  absl::StrAppend(&text, ")\nstep        ", plan.microbatches, " microbatches, at most ",
                  FormatCount(plan.tokens_per_step), " tokens, schedule ", plan.schedule, "; ", FormatCount(plan.steps),
                  " steps\npeak        ", plan.peak, "\n");
  const PlanSummary::Service heads{.name = "service", .what = "part", .device = "device"};
  size_t name_width = heads.name.size(), what_width = heads.what.size(), device_width = heads.device.size();
  for (const PlanSummary::Service& service : plan.services) {
    name_width = std::max(name_width, service.name.size());
    what_width = std::max(what_width, service.what.size());
    device_width = std::max(device_width, service.device.size());
  }
  const auto row = [&](const PlanSummary::Service& service, const std::string& parameters, const std::string& memory) {
    absl::StrAppendFormat(&text, "%-*s  %-*s  %-*s  %15s  %9s\n", static_cast<int>(name_width), service.name,
                          static_cast<int>(what_width), service.what, static_cast<int>(device_width), service.device,
                          parameters, memory);
  };
  row(heads, "parameters", "memory");
  for (const PlanSummary::Service& service : plan.services) {
    row(service, service.parameters > 0 ? FormatCount(service.parameters) : "-",
        service.memory_bytes > 0 ? FormatGiB(service.memory_bytes) : "-");
  }
  return text;
}

ProgressPrinter::ProgressPrinter(int fd, StepOutput output)
    : fd_(fd), output_(output), is_terminal_(::isatty(fd) == 1) {}

ProgressPrinter::~ProgressPrinter() {
  if (!bar_.empty()) Write(kEraseLine);
}

void ProgressPrinter::Step(const StepEvent& event) {
  const bool json = output_ == StepOutput::kJson;
  const std::string bar = is_terminal_ && !json ? ProgressBar(event, TerminalWidth(fd_) - 1) : "";
  Write(Above(json ? StepJson(event) : StepLine(event), bar_, bar));
  bar_ = bar;
}

void ProgressPrinter::Line(absl::string_view text) { Write(Above(text, bar_, bar_)); }

std::string ProgressPrinter::Above(absl::string_view text, absl::string_view old_bar, absl::string_view new_bar) {
  return absl::StrCat(old_bar.empty() ? "" : kEraseLine, text, "\n", new_bar);
}

void ProgressPrinter::Write(absl::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd_, text.data(), text.size());
    if (n <= 0) return;  // Nobody reads any more; the run goes on.
    text.remove_prefix(static_cast<size_t>(n));
  }
}

}  // namespace moonpipe
