#include "moonpipe/model/loss.h"

#include <algorithm>

#include "moonpipe/model/linear.h"

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class HeadCrossEntropyFunction : public torch::autograd::Function<HeadCrossEntropyFunction> {
 public:
  // `rows_R` are the trained rows.
  static variable_list forward(AutogradContext* context, const Tensor& hidden_TH, const Tensor& head_VH, const Tensor& labels_T,
                               const Tensor& rows_R, bool with_gradients) {
    const torch::Dtype dtype = hidden_TH.scalar_type();
    const Tensor head = head_VH.to(dtype);
    const Tensor x_RH = hidden_TH.index_select(0, rows_R);
    const Tensor targets_R1 = labels_T.index_select(0, rows_R).unsqueeze(1);
    Tensor nll_T = torch::zeros({hidden_TH.size(0)}, hidden_TH.options().dtype(torch::kFloat));
    Tensor dx_RH, dhead_VH;
    if (with_gradients) {
      dx_RH = torch::empty_like(x_RH);
      dhead_VH = rows_R.size(0) == 0 ? torch::zeros_like(head_VH) : torch::empty_like(head_VH);
    }
    const int64_t rows = rows_R.size(0);
    for (int64_t first = 0; first < rows; first += kLossRows) {
      const int64_t count = std::min(kLossRows, rows - first);
      const Tensor x = x_RH.narrow(0, first, count), targets = targets_R1.narrow(0, first, count);
      Tensor logits = at::mm(x, head.t()).to(torch::kFloat);
      const Tensor log_sum = logits.logsumexp(1, true);
      nll_T.index_copy_(0, rows_R.narrow(0, first, count), (log_sum - logits.gather(1, targets)).squeeze(1));
      if (!with_gradients) continue;
      // softmax - one-hot
      logits.sub_(log_sum).exp_();
      logits.scatter_add_(1, targets, torch::full_like(log_sum, -1));
      const Tensor dlogits = logits.to(dtype);
      Tensor dx = dx_RH.narrow(0, first, count);
      at::mm_out(dx, dlogits, head);
      if (dtype != dhead_VH.scalar_type()) {
        const Tensor product = at::mm(dlogits.t(), x);
        first == 0 ? dhead_VH.copy_(product) : dhead_VH.add_(product);
      } else if (first == 0) {
        at::mm_out(dhead_VH, dlogits.t(), x);
      } else {
        dhead_VH.addmm_(dlogits.t(), x);
      }
    }
    context->saved_data["tokens"] = hidden_TH.size(0);
    if (with_gradients) context->save_for_backward({dx_RH, dhead_VH, rows_R, head_VH});
    context->mark_non_differentiable({nll_T});
    return {nll_T.sum(), nll_T};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    Tensor dx_RH = saved[0], dhead_VH = saved[1];
    dx_RH.mul_(gradients[0]);
    if (Tensor sum_VH = GradientToAddTo(saved[3], dhead_VH.scalar_type()); sum_VH.defined()) {
      sum_VH.addcmul_(dhead_VH, gradients[0]);
      dhead_VH = Tensor();
    } else {
      dhead_VH.mul_(gradients[0]);
    }
    Tensor dhidden_TH = torch::zeros({context->saved_data["tokens"].toInt(), dx_RH.size(1)}, dx_RH.options());
    dhidden_TH.index_copy_(0, saved[2], dx_RH);
    return {dhidden_TH, dhead_VH, Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Loss HeadCrossEntropy(const Tensor& hidden_TH, const Tensor& head_VH, const Tensor& labels_T) {
  const int64_t rows = hidden_TH.size(0), vocabulary = head_VH.size(0);
  TORCH_CHECK(labels_T.dim() == 1 && labels_T.size(0) == rows, "hidden states have ", rows, " rows, labels ", labels_T.sizes());
  const Tensor wrong_T = ((labels_T < 0) & (labels_T != kIgnoredLabel)) | (labels_T >= vocabulary);
  TORCH_CHECK(!wrong_T.any().item<bool>(), "labels must be ", kIgnoredLabel, " or below ", vocabulary, "; ",
              wrong_T.sum().item<int64_t>(), " of ", rows, " are not");
  const Tensor rows_R = (labels_T != kIgnoredLabel).nonzero().flatten();
  const bool with_gradients = at::GradMode::is_enabled() && (hidden_TH.requires_grad() || head_VH.requires_grad());
  const variable_list results = HeadCrossEntropyFunction::apply(hidden_TH, head_VH, labels_T, rows_R, with_gradients);
  return {results[0], results[1].detach()};
}

}  // namespace moonpipe
