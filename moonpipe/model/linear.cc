#include "moonpipe/model/linear.h"

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A loop of plain products over slices: no masks, no atomics, the same bits for an expert whatever the others do. Outputs are written
// where they belong, and slices of no rows are never touched, so stale bytes of new memory reach nothing.
class GroupedLinearFunction : public torch::autograd::Function<GroupedLinearFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x_RI, const Tensor& weight_EOI, const std::vector<int64_t>& offsets) {
    context->save_for_backward({x_RI, weight_EOI});
    context->saved_data["offsets"] = offsets;
    Tensor y_RO = torch::empty({x_RI.size(0), weight_EOI.size(1)}, x_RI.options());
    for (size_t e = 0; e + 1 < offsets.size(); ++e) {
      const int64_t rows = offsets[e + 1] - offsets[e];
      if (rows == 0) continue;
      Tensor slice = y_RO.narrow(0, offsets[e], rows);
      at::mm_out(slice, x_RI.narrow(0, offsets[e], rows), weight_EOI.select(0, static_cast<int64_t>(e)).t());
    }
    return y_RO;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor& x_RI = saved[0];
    const Tensor& weight_EOI = saved[1];
    const std::vector<int64_t> offsets = context->saved_data["offsets"].toIntVector();
    const Tensor dy_RO = gradients[0].contiguous();
    Tensor dx_RI = torch::empty_like(x_RI);
    Tensor dweight_EOI = torch::empty_like(weight_EOI);
    for (size_t e = 0; e + 1 < offsets.size(); ++e) {
      const int64_t rows = offsets[e + 1] - offsets[e];
      Tensor dweight_OI = dweight_EOI.select(0, static_cast<int64_t>(e));
      if (rows == 0) {
        dweight_OI.zero_();
        continue;
      }
      const Tensor dy = dy_RO.narrow(0, offsets[e], rows);
      Tensor dx = dx_RI.narrow(0, offsets[e], rows);
      at::mm_out(dx, dy, weight_EOI.select(0, static_cast<int64_t>(e)));
      at::mm_out(dweight_OI, dy.t(), x_RI.narrow(0, offsets[e], rows));
    }
    return {dx_RI, dweight_EOI, Tensor()};
  }
};

}  // namespace

Tensor Linear(const Tensor& x_TI, const Tensor& weight_OI, const Tensor& bias_O) {
  const torch::Dtype dtype = x_TI.scalar_type();
  return at::linear(x_TI, weight_OI.to(dtype), bias_O.defined() ? std::optional<Tensor>(bias_O.to(dtype)) : std::nullopt);
}

Tensor GroupedLinear(const Tensor& x_RI, const Tensor& weight_EOI, const std::vector<int64_t>& offsets) {
  TORCH_CHECK(static_cast<int64_t>(offsets.size()) == weight_EOI.size(0) + 1 && offsets.back() == x_RI.size(0), "offsets for ",
              offsets.size() - 1, " experts end at row ", offsets.back(), ", but there are ", weight_EOI.size(0), " experts and ",
              x_RI.size(0), " rows");
  return GroupedLinearFunction::apply(x_RI.contiguous(), weight_EOI.to(x_RI.scalar_type()), offsets);
}

}  // namespace moonpipe
