// Norms over the last dimension with fp32 statistics. The product with the weight is taken in fp32 and cast last (the fused flavour).
#pragma once

#include <torch/torch.h>

namespace moonpipe {

// x_TH * rsqrt(mean(x_TH^2) + eps) * weight_H, for x [T, H].
torch::Tensor RmsNorm(const torch::Tensor& x_TH, const torch::Tensor& weight_H, double eps);

// (x - mean) * rsqrt(variance + eps) * weight + bias over the last dimension.
torch::Tensor LayerNorm(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias, double eps);

}  // namespace moonpipe
