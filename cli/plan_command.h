// `moonpipe plan`: what a model or a run file costs, before anything starts and on any machine: parameters by part, layers, memory and
// FLOPs of every device.
//
//   moonpipe plan --model kimi-k2.5 --stages 16 --expert 32 --format json
//   moonpipe plan run.yaml --set pipeline.stages=4
//
// Sizes that a run does not accept yet (data, expert, tensor, context) are counted by formula, and the output says so.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/pipeline/plan_estimate.h"

namespace moonpipe {

struct PlanArguments {
  std::string run_file;                // or --model
  std::string model;                   // a flavour, a model folder or a config.json
  std::vector<std::string> overrides;  // of the run file's fields, as in train
  // Short for the fields of `pipeline`.
  std::optional<int64_t> stages, microbatches, microbatch_tokens;
  std::optional<std::string> schedule;
  std::vector<int64_t> layers_per_stage;
  ParallelSizes parallel;
  // Pictures of a microbatch, all of one grid ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS in patches.
  std::optional<int64_t> pictures;
  std::string grid = "32x32";
  // The step's manifest as JSON of moonpipe.data.v1.StepManifest, instead of full microbatches of one document each.
  std::string manifest;
  std::string device;  // its name, for the peak; empty: unknown
  std::string format = "text";
};

// A plan with all that its output says.
struct PlanReport {
  std::string model;  // as it was named
  cluster::v1::TrainingRunSpec spec;
  ModelConfig config;
  ParallelSizes parallel;
  ScheduleOptions schedule;
  data::v1::StepManifest manifest;
  std::vector<PartRange> parts;
  PlanEstimate estimate;
  std::string device;
  std::optional<double> device_peak;  // absent: unknown
  // Why a run would not accept this plan today; empty: it would.
  std::vector<std::string> beyond_runs;
};

// INVALID_ARGUMENT lists every number that does not fit the model or the step, with the nearest that do; otherwise the errors of the
// files that are read.
absl::StatusOr<PlanReport> MakePlanReport(const PlanArguments& arguments);

// Aligned lines for a person, and one JSON object for a program. FLOPs and bytes are whole numbers.
std::string FormatPlanText(const PlanReport& report);
std::string FormatPlanJson(const PlanReport& report);

// Prints the plan.
absl::Status PlanCommand(const PlanArguments& arguments);

}  // namespace moonpipe
