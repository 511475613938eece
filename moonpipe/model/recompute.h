// Activation recomputation: what lies within a piece of the model is not kept for the backward but made again there.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <vector>

namespace moonpipe {

// A piece of the model, a pure function of x: the same bits each time. `again` is true in the backward, where nothing must be recorded.
// What it holds must outlive the graph.
using Piece = std::function<torch::Tensor(const torch::Tensor& x, bool again)>;

// piece(x, false), of which the graph keeps x alone. `trained`: some weight within wants a gradient. The backward has the bits of a graph
// that was kept.
torch::Tensor Recomputed(const torch::Tensor& x, bool trained, Piece piece);

bool AnyTrained(const std::vector<torch::Tensor>& weights);

}  // namespace moonpipe
