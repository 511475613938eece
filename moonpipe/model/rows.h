// Moving whole rows. The library's gradient of a gather scatters row by row; for a permutation the gradient is a gather itself, which
// is faster and has no order of addition to worry about.
#pragma once

#include <torch/torch.h>

namespace moonpipe {

// x[order] along the first dimension, where `inverse` undoes `order` (both int64 [T]).
torch::Tensor PermuteRows(const torch::Tensor& x, const torch::Tensor& order, const torch::Tensor& inverse);

// Gives every row of x_TH [T, H] to `copies` places: row r of the result is x_TH[row_source[r]], for row_source int64 [T * copies].
// row_of_copy int64 [T * copies] says where copy c of row t went, at t * copies + c; the gradient adds the copies in this order.
torch::Tensor SpreadRows(const torch::Tensor& x_TH, const torch::Tensor& row_source, const torch::Tensor& row_of_copy, int64_t copies);

}  // namespace moonpipe
