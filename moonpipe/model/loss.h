// Cross entropy summed over the trained tokens, in fp32. The caller divides by the step's global number of trained labels.
//
// Shapes: T tokens, H hidden, V vocabulary.
#pragma once

#include <torch/torch.h>

#include "moonpipe/spec/memory.h"

namespace moonpipe {

inline constexpr int64_t kIgnoredLabel = -100;

struct Loss {
  torch::Tensor sum;    // fp32 scalar, differentiable; exactly 0, with exactly zero gradients, when no label is trained
  torch::Tensor nll_T;  // fp32 [T], detached; 0 where ignored
};

// The cross entropy of hidden_TH head_VH^T, without the logits: rows that are not trained have none computed, and of the others kLossRows
// (spec/memory.h) exist at a time. labels_T int64 [T] is aligned: row t of hidden_TH predicts labels_T[t]. Negative labels other than
// kIgnoredLabel and labels of V or more are the caller's fault and throw c10::Error.
//
// Both gradients are made on the way, while a block's logits are there; the backward only scales them, in place, so a graph is walked back
// once. Between the two a gradient of the head's size is held: where many microbatches wait for their backward in the stage of the head,
// as in GPipe, each holds one. The product is taken in the type of hidden_TH.
Loss HeadCrossEntropy(const torch::Tensor& hidden_TH, const torch::Tensor& head_VH, const torch::Tensor& labels_T);

}  // namespace moonpipe
