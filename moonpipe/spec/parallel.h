// How many devices share a model, in each direction, and which numbers a model allows. Formulas only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

// Every combination is a device of its own: a stage has data * expert * tensor * context of them.
struct ParallelSizes {
  int64_t data = 1;     // copies of the model, each with its own microbatches
  int64_t expert = 1;   // devices that share the routed experts of a copy, each with its own microbatches
  int64_t tensor = 1;   // devices that share the heads and the inner widths of every layer
  int64_t context = 1;  // devices that share the tokens of a microbatch

  // Groups of devices that take different microbatches.
  int64_t replicas() const { return data * expert; }
  int64_t devices_per_stage() const { return data * expert * tensor * context; }
  bool is_one() const { return devices_per_stage() == 1; }
};

// One sentence for each size that the model or the step does not allow, with both numbers and the nearest sizes that are allowed:
//   tensor 48 does not divide num_attention_heads 64; the nearest that fit are 32 and 64
// Empty when all is well. `microbatches` is the number of a step, over all replicas.
std::vector<std::string> CheckParallel(const ModelConfig& config, const ParallelSizes& parallel, int64_t microbatches,
                                       int64_t microbatch_tokens);

// Elements of a tensor that one device holds: routed experts are shared by `expert` devices, heads, inner widths and vocabulary by
// `tensor` devices; norms, router, low-rank projections, tower and projector are whole everywhere.
int64_t ElementsPerDevice(const TensorSpec& tensor, const ParallelSizes& parallel);

// "3 and 6", "64": the greatest divisor of `number` below `wanted` and the least above.
std::string NearestDivisors(int64_t number, int64_t wanted);

}  // namespace moonpipe
