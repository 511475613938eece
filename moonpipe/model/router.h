// Which experts a token goes to, and with what weights (architecture section 4.5). fp32 throughout.
//
// Shapes: T tokens, E experts, K chosen per token.
#pragma once

#include <torch/torch.h>

#include <vector>

#include "moonpipe/spec/model_config.h"

namespace moonpipe {

struct Routing {
  torch::Tensor indices_TK;  // int64, ascending in each row, so that expert outputs are always added in one order
  torch::Tensor weights_TK;  // fp32, routed_scaling_factor included; differentiable
};

// From logits_TE fp32. Scores are sigmoids; correction_E is added for choosing only. With groups, a group's score is the sum of its two
// best corrected scores, and experts outside the kept groups cannot be chosen. `pinned_TK`, where defined, is chosen whatever the scores.
Routing Route(const TextConfig& config, const torch::Tensor& logits_TE, const torch::Tensor& correction_E, const torch::Tensor& pinned_TK = {});

// How a correction moves with the counts c of a step (architecture section 4.6).
enum class BiasRule {
  kSign,     // b += d, d = rate * sign(mean(c) - c)
  kCentred,  // b += d - mean(d): the moves of a step add up to nothing
};

// After a step, for its counts c int64 [E], summed over microbatches and replicas.
void UpdateCorrection(torch::Tensor correction_E, const torch::Tensor& counts_E, double rate, BiasRule rule = BiasRule::kSign);

// The sequence-wise auxiliary loss, summed over the documents: with K choices of E experts, a document of T tokens adds
//   sum over i of f_i * P_i,  f_i = E / (K * T) * #{tokens that chose i},  P_i = mean over its tokens of s_i / sum over j of s_j
// for scores s, the sigmoids of logits_TE. It is 1 for a document that uses all experts alike. The gradient goes through P alone.
// `lengths` cover the rows; fp32 scalar.
torch::Tensor BalanceLoss(const TextConfig& config, const torch::Tensor& logits_TE, const torch::Tensor& indices_TK,
                          const std::vector<int64_t>& lengths);

// `x` as it is; its backward also sends a gradient of 1 into the scalar `loss`. So a loss of one layer is trained wherever a pipeline is cut.
torch::Tensor AttachLoss(const torch::Tensor& x, const torch::Tensor& loss);

}  // namespace moonpipe
