#include "moonpipe/model/norms.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "moonpipe/model/activations.h"
#include "moonpipe/model/row_kernels.h"

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows of a block, which is a thread's least.
constexpr int64_t kRowGrain = 32;

// Written by hand because the library's version is a chain of a dozen differentiable operations on CPUs, which costs more than the
// arithmetic for small models.
class RmsNormFunction : public torch::autograd::Function<RmsNormFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x_TH, const Tensor& weight_H, double eps, bool round_first) {
    if (IsPlain(x_TH) && IsPlain(weight_H)) return ForwardOnHost(context, x_TH, weight_H, static_cast<float>(eps));
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
    if (IsPlain(saved[0]) && IsPlain(saved[1])) return BackwardOnHost(saved, gradients[0].contiguous());
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

 private:
  static Tensor ForwardOnHost(AutogradContext* context, const Tensor& x_TH, const Tensor& weight_H, float eps) {
    const int64_t width = x_TH.size(1);
    Tensor y_TH = torch::empty_like(x_TH);
    Tensor inverse_T1 = torch::empty({x_TH.size(0), 1}, x_TH.options());
    const float *const x = x_TH.const_data_ptr<float>(), *const weight = weight_H.const_data_ptr<float>();
    float *const y = y_TH.data_ptr<float>(), *const inverse = inverse_T1.data_ptr<float>();
    at::parallel_for(0, x_TH.size(0), kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) inverse[row] = rows::RmsNorm(x + row * width, weight, width, eps, y + row * width);
    });
    context->save_for_backward({x_TH, weight_H, inverse_T1});
    return y_TH;
  }

  // The weight's gradient is summed over blocks of rows, then over the blocks: in one order at any number of threads.
  static variable_list BackwardOnHost(const variable_list& saved, const Tensor& dy_TH) {
    const Tensor &x_TH = saved[0], &weight_H = saved[1];
    const int64_t height = x_TH.size(0), width = x_TH.size(1), blocks = (height + kRowGrain - 1) / kRowGrain;
    Tensor dx_TH = torch::empty_like(x_TH);
    const Tensor sums_BH = torch::zeros({blocks, width}, x_TH.options());
    const float *const x = x_TH.const_data_ptr<float>(), *const weight = weight_H.const_data_ptr<float>(), *const dy = dy_TH.const_data_ptr<float>();
    const float* const inverse = saved[2].const_data_ptr<float>();
    float *const dx = dx_TH.data_ptr<float>(), *const sums = sums_BH.data_ptr<float>();
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * kRowGrain; row < std::min(end * kRowGrain, height); ++row) {
        rows::RmsNormGradient(x + row * width, weight, dy + row * width, width, inverse[row], dx + row * width,
                              sums + row / kRowGrain * width);
      }
    });
    return {dx_TH, sums_BH.sum(0), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor RmsNorm(const Tensor& x_TH, const Tensor& weight_H, double eps, NormRounding rounding) {
  return RmsNormFunction::apply(x_TH.contiguous(), weight_H, eps, rounding == NormRounding::kBeforeWeight);
}

Tensor LayerNorm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const auto in_fp32 = [](const Tensor& tensor) { return tensor.to(torch::kFloat); };
  return at::layer_norm(in_fp32(x), {x.size(-1)}, in_fp32(weight), in_fp32(bias), eps).to(x.scalar_type());
}

}  // namespace moonpipe
