// Weights for training from scratch. Every value is a function of (seed, published name, index in the tensor) alone, so any split of
// the model over workers, threads and devices starts from the same bytes.
#pragma once

#include <torch/torch.h>

#include <cstdint>

#include "moonpipe/model/parameter_store.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

// Fills `out` (any dtype and device, of the spec's shape) as the spec's initializer says.
void DrawFreshTensor(uint64_t seed, const TensorSpec& spec, torch::Tensor out);

// Fills every tensor of the part.
void DrawFreshWeights(uint64_t seed, ParameterStore& store);

}  // namespace moonpipe
