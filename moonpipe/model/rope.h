// Rotary position embeddings over adjacent pairs (2j, 2j + 1), the layout of the published weights: (a, b) becomes
// (a cos - b sin, a sin + b cos). Angles are made and applied in fp32 (architecture sections 3.5 and 4.3).
//
// Shapes: T rows, N heads, d rotated width.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "moonpipe/spec/model_config.h"

namespace moonpipe {

// Cosines and sines of every row, expanded to the width: both entries of a pair carry its cosine; sines are (-sin, +sin).
struct RotaryTable {
  torch::Tensor cos_T1d;
  torch::Tensor sin_T1d;
};

// Turns angles [T, d / 2] of the pairs into a table.
RotaryTable MakeRotaryTable(const torch::Tensor& angles_Tp);

// Rotates all heads of x_TNd [T, N, d] by the row's angles.
torch::Tensor Rotate(const torch::Tensor& x_TNd, const RotaryTable& table);
// Rotates the columns from `first_column` of the first `heads` heads and leaves the rest as it is; the table is of d - first_column.
torch::Tensor RotatePart(const torch::Tensor& x_TNd, const RotaryTable& table, int64_t heads, int64_t first_column);

// The decoder's frequencies for qk_rope_head_dim / 2 pairs, YaRN included.
std::vector<float> TextFrequencies(const TextConfig& config);

// Scale of the attention scores: qk_head_dim^-0.5, times YaRN's squared magnitude where configured.
double AttentionScale(const TextConfig& config);

// Angles of positions 0 .. count - 1, [count, d / 2].
torch::Tensor TextAngles(const TextConfig& config, int64_t count);

// Angles of a picture's patches in row-major order, [rows * cols, d / 2]: pair 2k turns by column * f_k, pair 2k + 1 by row * f_k.
torch::Tensor PatchAngles(int64_t rows, int64_t cols, int64_t head_dim);

}  // namespace moonpipe
