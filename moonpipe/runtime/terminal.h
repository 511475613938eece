// What a person sees: the summary of the plan, one line a step in torchtitan's manner, a progress bar. Pure functions
// of an event and a width; only ProgressPrinter writes. No colour and no bar where the output is no terminal.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "moonpipe/cluster/v1/training_run.pb.h"

namespace moonpipe {

// step:    7/200  loss:  3.1416  grad_norm:  1.2345  tps: 12,345  mfu: 41.17%  memory:  0.47GiB  bubble: 12.3%  eta: 1m
// 02s `mfu: unknown` where the peak is not known; `step:    7/200  skipped: not_finite  ...` for a skipped step.
// Columns keep their width from step to step.
std::string StepLine(const cluster::v1::StepEvent& event);

// The same as one JSON object on one line, with the field names of StepEvent and tokens_per_second, all of them always
// there; what is absent or not finite is null.
std::string StepJson(const cluster::v1::StepEvent& event);

// ` 35% |=======>            | 7/20  loss 3.1416  eta 1m 02s`, at most `width` columns; the bar takes what the text
// leaves.
std::string ProgressBar(const cluster::v1::StepEvent& event, int width);

// 12,345
std::string FormatCount(uint64_t count);
// 0.47GiB
std::string FormatGiB(double bytes);
// 59s, 1m 02s, 2h 05m, 3d 04h
std::string FormatDuration(double seconds);

// What will be trained and where, before step 1.
struct PlanSummary {
  struct Service {
    std::string name;  // decoder-0
    std::string what;  // layers 0-1, embedding
    uint64_t parameters = 0;
    double memory_bytes = 0;  // Estimate: weights, gradients, optimizer state, activations.
    std::string device;       // cpu
  };
  std::string run;
  std::string model;  // kimi_vl, 27 layers
  std::vector<Service> services;
  // Parameters by part, in order: vision, projector, decoder.
  std::vector<std::pair<std::string, uint64_t>> parameters;
  uint64_t active_parameters = 0;  // Of one token; 0 where all are.
  uint64_t steps = 0;
  uint64_t microbatches = 0;
  uint64_t tokens_per_step = 0;  // The most that the packing allows.
  std::string schedule;          // 1f1b
  std::string peak;              // 52.1 GFLOP/s (measured), or unknown
};

// Several lines, aligned, ending in a line feed.
std::string FormatPlanSummary(const PlanSummary& plan);

enum class StepOutput { kText, kJson };

// Prints events to a file descriptor: on a terminal each line with a bar below it that stays at the bottom, elsewhere
// plain lines.
class ProgressPrinter {
 public:
  // Looks at `fd` once: is it a terminal?
  ProgressPrinter(int fd, StepOutput output);
  // Leaves the terminal with the bar gone and the cursor at the start of a line.
  ~ProgressPrinter();
  ProgressPrinter(const ProgressPrinter&) = delete;
  ProgressPrinter& operator=(const ProgressPrinter&) = delete;

  void Step(const cluster::v1::StepEvent& event);
  // Any other line, above the bar.
  void Line(absl::string_view text);

  // The bytes that `Step` and `Line` write: exposed because they are a pure function of the bar that stands there.
  static std::string Above(absl::string_view text, absl::string_view old_bar, absl::string_view new_bar);

 private:
  void Write(absl::string_view text);

  const int fd_;
  const StepOutput output_;
  const bool is_terminal_;
  std::string bar_;
};

}  // namespace moonpipe
