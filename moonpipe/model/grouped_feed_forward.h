// down(silu(gate x) * up x) with one set of weights per expert over contiguous slices of rows.
//
// On the host in fp32 an expert is one piece of work: threads take the next one, largest first, and its products, activation and gradients
// stay in that thread's cache. The bits of an expert depend on its rows alone. Elsewhere it is GroupedLinear (linear.h) three times.
//
// Shapes: R rows sorted by expert, E experts, H hidden, F inner width.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace moonpipe {

// x_RH [R, H], gate and up [E, F, H], down [E, H, F], offsets as for GroupedLinear -> [R, H]. Gradients of the weights are added in place
// where they are defined already (linear.h); an expert without rows gets none, or exact zeros.
torch::Tensor GroupedFeedForward(const torch::Tensor& x_RH, const torch::Tensor& gate_EFH, const torch::Tensor& up_EFH,
                                 const torch::Tensor& down_EHF, const std::vector<int64_t>& offsets);

}  // namespace moonpipe
