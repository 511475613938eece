// The activations of feed-forward blocks, each with its gradient, in one pass where the library takes several.
//
// Shapes: T rows, F inner width.
#pragma once

#include <torch/torch.h>

namespace moonpipe {

// fp32 on the host: where the loops of row_kernels.h are used.
inline bool IsPlain(const torch::Tensor& x) { return x.is_cpu() && x.scalar_type() == torch::kFloat; }

// silu(gate) * up, both [T, F].
torch::Tensor SwiGlu(const torch::Tensor& gate_TF, const torch::Tensor& up_TF);
// The approximation by tanh.
torch::Tensor GeluTanh(const torch::Tensor& x_TF);

}  // namespace moonpipe
