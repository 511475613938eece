// What a plan costs before anything runs: the part, the memory and the FLOPs of every device. Pure formulas over the tensor list that
// loading uses; the summary that a run prints and `moonpipe plan` both come from here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "moonpipe/data/v1/manifest.pb.h"
#include "moonpipe/pipeline/schedule.h"
#include "moonpipe/spec/flops.h"
#include "moonpipe/spec/memory.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/parallel.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

// The parts of the stages, in order: what every planner uses. An empty `layers_per_stage` cuts evenly by cost. The tower goes to
// stage 0 if it is placed there. INVALID_ARGUMENT with both numbers for counts that the model does not allow.
absl::StatusOr<std::vector<PartRange>> PartsOfStages(const ModelConfig& config, int32_t stages,
                                                     const std::vector<uint32_t>& layers_per_stage, bool vision_in_first_stage);

struct EstimateInputs {
  ScheduleOptions schedule;        // its microbatches are those of one replica
  std::vector<PartRange> parts;    // of the stages, as PartsOfStages gives them
  int64_t microbatch_tokens = 0;
  int64_t patches = -1;            // of a microbatch's pictures; -1: the worst, every token a media position
  int64_t gradient_groups = 1;
  Recompute recompute = Recompute::kNone;
  ParallelSizes parallel = {};
  // The step over all replicas, for the FLOPs; empty: none are counted.
  data::v1::StepManifest manifest = {};
  FrozenParts frozen = {};
  std::vector<bool> frozen_tensors = {};  // by tensor of ListTensors(config); empty: none
  std::vector<bool> muon_tensors = {};    // likewise: one moment instead of two
};

// Devices that do the same: one of each stage and of the encoder, in every replica.
struct DeviceEstimate {
  std::string name;  // vision encoder, decoder stage 3
  PartRange part;
  int64_t devices = 1;
  int64_t live_microbatches = 1;  // forwards that wait for their backward at the worst moment of the schedule
  MemoryEstimate memory;
  StepFlops flops;  // of one device in a step, on average over the replicas; rounded down to whole numbers
};

struct PlanEstimate {
  ParameterCounts parameters;
  std::vector<DeviceEstimate> devices;  // the encoder first where it is a service of its own
  StepFlops flops;                      // of the step, over all devices
  int64_t num_devices = 0;
};

// INVALID_ARGUMENT for a schedule that cannot be made.
absl::StatusOr<PlanEstimate> EstimatePlan(const ModelConfig& config, const EstimateInputs& inputs);

// "embedding, layers 0-8", "layer 3, head and loss", "vision tower and projector".
std::string PartInWords(const PartRange& part);

}  // namespace moonpipe
