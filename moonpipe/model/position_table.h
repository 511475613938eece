// The tower's learned position table, resized to a picture's grid by bicubic interpolation (kernel constant -0.75, half-pixel centres,
// clamped edges, no antialiasing; architecture section 3.4).
//
// Shapes: h, w rows and columns of the grid; R, C of the table; D width.
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace moonpipe {

// Weights of one axis, fp32 [to, from]: output i is the sum over j of weights[i][j] * input[j]. The identity, exactly, if to == from.
torch::Tensor CubicWeights(int64_t to, int64_t from);

// table_RCD [R, C, D] -> [h * w, D], row-major; rows_hR and cols_wC are CubicWeights on the table's device. In fp32, cast back.
torch::Tensor InterpolatePositions(const torch::Tensor& table_RCD, const torch::Tensor& rows_hR, const torch::Tensor& cols_wC);

// The fixed term of frame p of a clip: sin(p * w_i) then cos(p * w_i), w_i = 10000^(-i / (D / 2)); fp32 [frames, D].
torch::Tensor FramePositions(int64_t frames, int64_t width);

}  // namespace moonpipe
