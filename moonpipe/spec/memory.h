// What a device's part of the model takes in memory, before anything is allocated: the live bytes of tensors at the worst
// moment of a step. State is exact. Activations are counted by the tensors that the backward keeps, layer by layer; the
// worst moment is when all of them are held and a backward begins, so the largest passing tensors are added to them.
// Sizes of the allocator's rounding, of the program and of the network's buffers are not in it.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "moonpipe/spec/parallel.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

// Rows whose logits the loss holds at one time.
inline constexpr int64_t kLossRows = 256;

// What the backward makes again instead of keeping it.
enum class Recompute {
  kNone,
  kExperts,  // the second half of each decoder layer: norm, router, experts or dense block
  kLayers,   // each decoder layer and each block of the tower
};

// none, experts or layers, as `train.recompute` calls them; anything else is none.
Recompute RecomputeOf(absl::string_view name);

struct MemoryOptions {
  int64_t microbatch_tokens = 0;  // rows of the packed sequence
  int64_t live_microbatches = 1;  // forwards that wait for their backward at the worst moment
  int64_t frozen_parameters = 0;  // of the part: weights only, no gradient and no moments
  int64_t one_moment_parameters = 0;  // of those that are trained: Muon's
  int64_t patches = -1;           // of a microbatch's pictures; -1: the worst, every token a media position
  int64_t gradient_groups = 1;    // each has gradients of its own
  ParallelSizes parallel = {};
  Recompute recompute = Recompute::kNone;
};

struct MemoryEstimate {
  int64_t parameters = 0;       // that the device holds
  int64_t weights_bytes = 0;    // fp32
  int64_t gradients_bytes = 0;  // fp32, of every group
  int64_t optimizer_bytes = 0;  // fp32 moments, two or one a parameter
  int64_t activations_bytes = 0;  // fp32, kept for the backward by all live microbatches
  int64_t working_bytes = 0;      // passing tensors at the worst moment
  int64_t state_bytes() const { return weights_bytes + gradients_bytes + optimizer_bytes; }
  int64_t total_bytes() const { return state_bytes() + activations_bytes + working_bytes; }
};

// The part of the device is what ListTensors gives for `range`, divided by the parallel sizes.
MemoryEstimate EstimateMemory(const ModelConfig& config, const PartRange& range, const MemoryOptions& options);

}  // namespace moonpipe
