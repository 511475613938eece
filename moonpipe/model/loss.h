// Cross entropy summed over the trained tokens, in fp32. The caller divides by the step's global number of trained labels.
//
// Shapes: T tokens, V vocabulary.
#pragma once

#include <torch/torch.h>

namespace moonpipe {

inline constexpr int64_t kIgnoredLabel = -100;

struct Loss {
  torch::Tensor sum;    // fp32 scalar, differentiable; exactly 0, with exactly zero gradients, when no label is trained
  torch::Tensor nll_T;  // fp32 [T], detached; 0 where ignored
};

// labels_T int64 [T] is aligned: row t of logits_TV [T, V] predicts labels_T[t]. Negative labels other than kIgnoredLabel and labels of V
// or more are the caller's fault and throw c10::Error.
Loss SummedCrossEntropy(const torch::Tensor& logits_TV, const torch::Tensor& labels_T);

}  // namespace moonpipe
