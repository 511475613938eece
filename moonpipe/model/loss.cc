#include "moonpipe/model/loss.h"

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Keeps the logits and one number a row instead of the log-probabilities: at published vocabularies each [T, V] tensor counts.
class CrossEntropyFunction : public torch::autograd::Function<CrossEntropyFunction> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& logits_TV, const Tensor& labels_T) {
    const Tensor trained_T1 = (labels_T != kIgnoredLabel).unsqueeze(1);
    const Tensor targets_T1 = labels_T.clamp_min(0).unsqueeze(1);
    const Tensor logits32_TV = logits_TV.to(torch::kFloat);
    const Tensor log_sum_T1 = logits32_TV.logsumexp(1, true);
    const Tensor nll_T = (log_sum_T1 - logits32_TV.gather(1, targets_T1)).masked_fill_(trained_T1.logical_not(), 0).squeeze(1);
    context->save_for_backward({logits_TV, log_sum_T1, targets_T1, trained_T1});
    context->mark_non_differentiable({nll_T});
    return {nll_T.sum(), nll_T};
  }

  // softmax - one-hot, for trained rows.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor scale_T1 = saved[3].to(torch::kFloat) * gradients[0];
    Tensor dlogits_TV = (saved[0].to(torch::kFloat) - saved[1]).exp_().mul_(scale_T1);
    dlogits_TV.scatter_add_(1, saved[2], scale_T1.neg());
    return {dlogits_TV.to(saved[0].scalar_type()), Tensor()};
  }
};

}  // namespace

Loss SummedCrossEntropy(const Tensor& logits_TV, const Tensor& labels_T) {
  TORCH_CHECK(labels_T.dim() == 1 && labels_T.size(0) == logits_TV.size(0), "logits have ", logits_TV.size(0), " rows, labels ", labels_T.sizes());
  const Tensor wrong_T = ((labels_T < 0) & (labels_T != kIgnoredLabel)) | (labels_T >= logits_TV.size(1));
  TORCH_CHECK(!wrong_T.any().item<bool>(), "labels must be ", kIgnoredLabel, " or below ", logits_TV.size(1), "; ",
              wrong_T.sum().item<int64_t>(), " of ", labels_T.size(0), " are not");
  const variable_list results = CrossEntropyFunction::apply(logits_TV, labels_T);
  return {results[0], results[1].detach()};
}

}  // namespace moonpipe
