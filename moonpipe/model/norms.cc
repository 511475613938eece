#include "moonpipe/model/norms.h"

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Written by hand because the library's version is a chain of a dozen differentiable operations on CPUs, which costs more than the
// arithmetic for small models.
class RmsNormFunction : public torch::autograd::Function<RmsNormFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x_TH, const Tensor& weight_H, double eps, bool round_first) {
    const Tensor x32_TH = x_TH.to(torch::kFloat);
    const Tensor inverse_T1 = x32_TH.square().mean(-1, true).add_(eps).rsqrt_();
    context->save_for_backward({x_TH, weight_H, inverse_T1});
    const torch::Dtype dtype = x_TH.scalar_type();
    if (!round_first) return (x32_TH * inverse_T1).mul_(weight_H.to(torch::kFloat)).to(dtype);
    return (x32_TH * inverse_T1).to(dtype).mul_(weight_H.to(dtype));
  }

  // With n = x * r and g = dy * w: dx = r * (g - n * mean(g * n)), dw = sum over rows of dy * n.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor& weight_H = saved[1];
    const Tensor& inverse_T1 = saved[2];
    const Tensor dy_TH = gradients[0].to(torch::kFloat);
    const Tensor normed_TH = saved[0].to(torch::kFloat) * inverse_T1;
    const Tensor dweight_H = (dy_TH * normed_TH).sum(0);
    const Tensor scaled_TH = dy_TH * weight_H.to(torch::kFloat);
    const Tensor mean_T1 = (scaled_TH * normed_TH).mean(-1, true);
    const Tensor dx_TH = scaled_TH.sub(normed_TH.mul(mean_T1)).mul_(inverse_T1);
    return {dx_TH.to(saved[0].scalar_type()), dweight_H.to(weight_H.scalar_type()), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor RmsNorm(const Tensor& x_TH, const Tensor& weight_H, double eps, NormRounding rounding) {
  return RmsNormFunction::apply(x_TH, weight_H, eps, rounding == NormRounding::kBeforeWeight);
}

Tensor LayerNorm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const auto in_fp32 = [](const Tensor& tensor) { return tensor.to(torch::kFloat); };
  return at::layer_norm(in_fp32(x), {x.size(-1)}, in_fp32(weight), in_fp32(bias), eps).to(x.scalar_type());
}

}  // namespace moonpipe
