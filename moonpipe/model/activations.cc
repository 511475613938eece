#include "moonpipe/model/activations.h"

#include <ATen/Parallel.h>

#include "moonpipe/model/row_kernels.h"

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Elements that are worth a thread.
constexpr int64_t kGrain = 16384;

class SwiGluFunction : public torch::autograd::Function<SwiGluFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& gate, const Tensor& up) {
    context->save_for_backward({gate, up});
    Tensor y = torch::empty_like(gate);
    const float *const g = gate.const_data_ptr<float>(), *const u = up.const_data_ptr<float>();
    float* const out = y.data_ptr<float>();
    at::parallel_for(0, y.numel(), kGrain, [&](int64_t begin, int64_t end) { rows::SwiGlu(g + begin, u + begin, end - begin, out + begin); });
    return y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor dy = gradients[0].contiguous();
    Tensor dgate = torch::empty_like(dy), dup = torch::empty_like(dy);
    const float *const g = saved[0].const_data_ptr<float>(), *const u = saved[1].const_data_ptr<float>(), *const d = dy.const_data_ptr<float>();
    float *const dg = dgate.data_ptr<float>(), *const du = dup.data_ptr<float>();
    at::parallel_for(0, dy.numel(), kGrain, [&](int64_t begin, int64_t end) {
      rows::SwiGluGradient(g + begin, u + begin, d + begin, end - begin, dg + begin, du + begin);
    });
    return {dgate, dup};
  }
};

class GeluTanhFunction : public torch::autograd::Function<GeluTanhFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x});
    Tensor y = torch::empty_like(x);
    const float* const in = x.const_data_ptr<float>();
    float* const out = y.data_ptr<float>();
    at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) { rows::GeluTanh(in + begin, end - begin, out + begin); });
    return y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Tensor x = context->get_saved_variables()[0], dy = gradients[0].contiguous();
    Tensor dx = torch::empty_like(dy);
    const float *const in = x.const_data_ptr<float>(), *const d = dy.const_data_ptr<float>();
    float* const out = dx.data_ptr<float>();
    at::parallel_for(0, x.numel(), kGrain,
                     [&](int64_t begin, int64_t end) { rows::GeluTanhGradient(in + begin, d + begin, end - begin, out + begin); });
    return {dx};
  }
};

}  // namespace

Tensor SwiGlu(const Tensor& gate_TF, const Tensor& up_TF) {
  if (!IsPlain(gate_TF)) return at::silu(gate_TF) * up_TF;
  return SwiGluFunction::apply(gate_TF.contiguous(), up_TF.contiguous());
}

Tensor GeluTanh(const Tensor& x_TF) { return IsPlain(x_TF) ? GeluTanhFunction::apply(x_TF.contiguous()) : at::gelu(x_TF, "tanh"); }

}  // namespace moonpipe
