// What a worker's part of the model takes in memory, before anything is allocated. An estimate for `moonpipe plan` and
// for warnings: state is exact, activations are counted by the tensors that a straightforward backward keeps.
#pragma once

#include <cstdint>

#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

struct MemoryOptions {
  int64_t microbatch_tokens = 0;  // rows of the packed sequence
  int64_t live_microbatches = 1;  // forwards that wait for their backward at the worst moment
  int64_t frozen_parameters = 0;  // of the part: weights only, no gradient and no moments
};

struct MemoryEstimate {
  int64_t parameters = 0;
  int64_t weights_bytes = 0;    // fp32
  int64_t gradients_bytes = 0;  // fp32
  int64_t optimizer_bytes = 0;  // two fp32 moments
  // fp32, of all live microbatches, plus the largest passing buffer: logits and their gradient.
  int64_t activations_bytes = 0;
  int64_t state_bytes() const { return weights_bytes + gradients_bytes + optimizer_bytes; }
  int64_t total_bytes() const { return state_bytes() + activations_bytes; }
};

// The part of the worker is what ListTensors gives for `range`. Pictures are taken at their worst: every token a media
// position.
MemoryEstimate EstimateMemory(const ModelConfig& config, const PartRange& range, const MemoryOptions& options);

}  // namespace moonpipe
