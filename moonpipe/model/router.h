// Which experts a token goes to, and with what weights (architecture section 4.5). fp32 throughout.
//
// Shapes: T tokens, E experts, K chosen per token.
#pragma once

#include <torch/torch.h>

#include "moonpipe/spec/model_config.h"

namespace moonpipe {

struct Routing {
  torch::Tensor indices_TK;  // int64, ascending in each row, so that expert outputs are always added in one order
  torch::Tensor weights_TK;  // fp32, routed_scaling_factor included; differentiable
};

// From logits_TE fp32. Scores are sigmoids; correction_E is added for choosing only. With groups, a group's score is the sum of its two
// best corrected scores, and experts outside the kept groups cannot be chosen. `pinned_TK`, where defined, is chosen whatever the scores.
Routing Route(const TextConfig& config, const torch::Tensor& logits_TE, const torch::Tensor& correction_E, const torch::Tensor& pinned_TK = {});

// After a step: b += rate * sign(mean(c) - c), for the step's counts c int64 [E], summed over microbatches and replicas.
void UpdateCorrection(torch::Tensor correction_E, const torch::Tensor& counts_E, double rate);

}  // namespace moonpipe
