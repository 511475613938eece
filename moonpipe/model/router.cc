#include "moonpipe/model/router.h"

#include <limits>

namespace moonpipe {
namespace {

using torch::Tensor;

// Scores of experts outside the kept groups become -infinity; zero would win over negative corrected scores.
Tensor KeepBestGroups(const TextConfig& config, const Tensor& choice_TE) {
  const Tensor by_group_TGg = choice_TE.unflatten(1, {config.n_group, -1});
  const Tensor group_scores_TG = std::get<0>(by_group_TGg.topk(2, -1)).sum(-1);
  const Tensor kept_TJ = std::get<1>(group_scores_TG.topk(config.topk_group, -1, true, false));
  const Tensor dropped_TG = torch::ones_like(group_scores_TG, torch::kBool).scatter_(1, kept_TJ, false);
  return by_group_TGg.masked_fill(dropped_TG.unsqueeze(-1), -std::numeric_limits<float>::infinity()).flatten(1);
}

class AttachFunction : public torch::autograd::Function<AttachFunction> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& loss) {
    context->save_for_backward({loss});
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    return {gradients[0], torch::ones_like(context->get_saved_variables()[0])};
  }
};

}  // namespace

Routing Route(const TextConfig& config, const Tensor& logits_TE, const Tensor& correction_E, const Tensor& pinned_TK) {
  const Tensor scores_TE = logits_TE.sigmoid();
  Routing routing;
  if (pinned_TK.defined()) {
    TORCH_CHECK(pinned_TK.dim() == 2 && pinned_TK.size(0) == logits_TE.size(0) && pinned_TK.size(1) == config.num_experts_per_tok,
                "the pinned choices are ", pinned_TK.sizes(), ", the router chooses [", logits_TE.size(0), ", ", config.num_experts_per_tok, "]");
    routing.indices_TK = pinned_TK;
  } else {
    const torch::NoGradGuard no_grad;
    Tensor choice_TE = scores_TE + correction_E;
    if (config.n_group > 1) choice_TE = KeepBestGroups(config, choice_TE);
    const Tensor chosen_TK = std::get<1>(choice_TE.topk(config.num_experts_per_tok, -1, true, false));
    routing.indices_TK = std::get<0>(chosen_TK.sort(-1));
  }
  Tensor weights_TK = scores_TE.gather(1, routing.indices_TK);
  if (config.norm_topk_prob && config.num_experts_per_tok > 1) weights_TK = weights_TK / (weights_TK.sum(-1, true) + 1e-20);
  routing.weights_TK = weights_TK * config.routed_scaling_factor;
  return routing;
}

void UpdateCorrection(Tensor correction_E, const Tensor& counts_E, double rate, BiasRule rule) {
  const torch::NoGradGuard no_grad;
  const Tensor counts = counts_E.to(correction_E.device(), torch::kDouble);
  Tensor moves = (counts.mean() - counts).sign();
  if (rule == BiasRule::kCentred) moves -= moves.mean();
  correction_E.add_(moves.to(correction_E.scalar_type()), rate);
}

Tensor BalanceLoss(const TextConfig& config, const Tensor& logits_TE, const Tensor& indices_TK, const std::vector<int64_t>& lengths) {
  const Tensor scores_TE = logits_TE.sigmoid();
  const Tensor shares_TE = scores_TE / scores_TE.sum(-1, true);
  const Tensor chosen_TE = torch::zeros_like(shares_TE).detach().scatter_(1, indices_TK, 1.0);
  const std::vector<Tensor> shares = shares_TE.split_with_sizes(lengths);
  const std::vector<Tensor> chosen = chosen_TE.split_with_sizes(lengths);
  std::vector<Tensor> terms;
  for (size_t document = 0; document < lengths.size(); ++document) terms.push_back((chosen[document].mean(0) * shares[document].mean(0)).sum());
  return torch::stack(terms).sum() * (static_cast<double>(config.n_routed_experts) / static_cast<double>(config.num_experts_per_tok));
}

Tensor AttachLoss(const Tensor& x, const Tensor& loss) { return AttachFunction::apply(x, loss); }

}  // namespace moonpipe
