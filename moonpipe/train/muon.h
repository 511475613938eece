// The arithmetic of Muon in the form that Kimi trains with (J. Liu et al., Muon is scalable for LLM training, 2025).
//
// Shapes: R rows, C columns of one matrix.
#pragma once

#include <torch/torch.h>

#include <vector>

#include "moonpipe/train/muon_parts.h"

namespace moonpipe {

// Five Newton-Schulz iterations X <- a X + (b A + c A^2) X, A = X X^T, with a = 3.4445, b = -4.7750, c = 2.0315, from
// X = matrix_RC / max(|matrix_RC|_F, 1e-7): a matrix of the same singular vectors with singular values near 1. In fp32; zeros give zeros.
torch::Tensor Orthogonalize(const torch::Tensor& matrix_RC);

struct MuonStep {
  double learning_rate = 0;
  double weight_decay = 0;
  double momentum = 0.95;
};

// With m <- momentum m + (1 - momentum) g and u = momentum m + (1 - momentum) g (Nesterov):
//   W <- (1 - rate * decay) W - rate * 0.2 * sqrt(max(R, C)) * Orthogonalize(u)
// for each of `parts` with its own R and C. The factor gives updates the root mean square of AdamW's, so that both can share a rate.
// value, gradient and momentum are fp32 of the tensor's whole shape; value and momentum change in place.
void TakeMuonStep(const MuonStep& step, const std::vector<MatrixPart>& parts, torch::Tensor value, const torch::Tensor& gradient,
                  torch::Tensor momentum);

}  // namespace moonpipe
