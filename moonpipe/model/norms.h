// Norms over the last dimension. Statistics and products are fp32; the result has the type of x.
#pragma once

#include <torch/torch.h>

#include "moonpipe/model/compute_options.h"

namespace moonpipe {

// x_TH * rsqrt(mean(x_TH^2) + eps) * weight_H, for x [T, H]. `rounding` says where a bf16 result is rounded besides at the end; the
// gradient is that of the formula without rounding.
torch::Tensor RmsNorm(const torch::Tensor& x_TH, const torch::Tensor& weight_H, double eps,
                      NormRounding rounding = NormRounding::kBeforeWeight);

// (x - mean) * rsqrt(variance + eps) * weight + bias over the last dimension.
torch::Tensor LayerNorm(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias, double eps);

}  // namespace moonpipe
