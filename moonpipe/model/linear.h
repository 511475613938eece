// Every matrix product with a weight goes through here, dense or by expert, so that the weight's gradient is made in one place. The product
// is taken in the type of x: an fp32 master weight under bf16 activations is rounded here, and its gradient comes back as fp32.
//
// A backward adds to the gradient of a weight in place where the weight is a leaf that has one already, of the products' type, as all have
// during a step (train/gradients.h). So these are for backward(), not for torch::autograd::grad over weights with gradients.
//
// Shapes: T rows (tokens or patches), R rows sorted by expert, E experts, I and O input and output width.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace moonpipe {

// The gradient that a backward may add to where it lies, undefined where the engine has to carry it.
torch::Tensor GradientToAddTo(const torch::Tensor& weight, torch::Dtype dtype);

// x_TI [T, I], weight_OI [O, I], bias_O [O] or undefined -> [T, O].
torch::Tensor Linear(const torch::Tensor& x_TI, const torch::Tensor& weight_OI, const torch::Tensor& bias_O = {});

// One weight per expert over contiguous slices of rows: rows offsets[e] .. offsets[e + 1] of x_RI [R, I] times weight_EOI[e]
// transposed -> [R, O]. `offsets` has E + 1 entries from 0 to R. An expert without rows gets a gradient of exact zeros.
torch::Tensor GroupedLinear(const torch::Tensor& x_RI, const torch::Tensor& weight_EOI, const std::vector<int64_t>& offsets);

// Throws c10::Error unless `offsets` are those of GroupedLinear.
void CheckOffsets(const torch::Tensor& x_RI, const torch::Tensor& weight_EOI, const std::vector<int64_t>& offsets);

// Rows ids_T [T] of weight_VH [V, H], which are in range -> [T, H] in the type of the weight.
torch::Tensor Embedding(const torch::Tensor& weight_VH, const torch::Tensor& ids_T);

}  // namespace moonpipe
