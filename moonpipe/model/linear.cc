#include "moonpipe/model/linear.h"

#include <optional>

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x_TI, const Tensor& weight_OI, const std::optional<Tensor>& bias_O) {
    context->save_for_backward({x_TI, weight_OI});
    context->saved_data["has_bias"] = bias_O.has_value();
    return bias_O.has_value() ? at::addmm(*bias_O, x_TI, weight_OI.t()) : at::mm(x_TI, weight_OI.t());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &x_TI = saved[0], &weight_OI = saved[1], &dy_TO = gradients[0];
    const bool has_bias = context->saved_data["has_bias"].toBool();
    Tensor dx_TI, dweight_OI, dbias_O;
    if (context->needs_input_grad(0)) dx_TI = at::mm(dy_TO, weight_OI);
    if (context->needs_input_grad(1)) {
      if (Tensor sum_OI = GradientToAddTo(weight_OI, dy_TO.scalar_type()); sum_OI.defined()) {
        sum_OI.addmm_(dy_TO.t(), x_TI);
      } else {
        dweight_OI = at::mm(dy_TO.t(), x_TI);
      }
    }
    if (has_bias && context->needs_input_grad(2)) dbias_O = dy_TO.sum(0);
    return {dx_TI, dweight_OI, dbias_O};
  }
};

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
    const bool trained = context->needs_input_grad(1);
    const Tensor sum_EOI = trained ? GradientToAddTo(weight_EOI, dy_RO.scalar_type()) : Tensor();
    Tensor dx_RI, dweight_EOI;
    if (context->needs_input_grad(0)) dx_RI = torch::empty_like(x_RI);
    if (trained && !sum_EOI.defined()) dweight_EOI = torch::empty_like(weight_EOI);
    for (size_t e = 0; e + 1 < offsets.size(); ++e) {
      const auto expert = static_cast<int64_t>(e);
      const int64_t rows = offsets[e + 1] - offsets[e];
      if (rows == 0) {
        if (dweight_EOI.defined()) dweight_EOI.select(0, expert).zero_();
        continue;
      }
      const Tensor dy = dy_RO.narrow(0, offsets[e], rows);
      if (dx_RI.defined()) {
        Tensor dx = dx_RI.narrow(0, offsets[e], rows);
        at::mm_out(dx, dy, weight_EOI.select(0, expert));
      }
      if (!trained) continue;
      const Tensor x = x_RI.narrow(0, offsets[e], rows);
      if (sum_EOI.defined()) {
        sum_EOI.select(0, expert).addmm_(dy.t(), x);
      } else {
        Tensor dweight_OI = dweight_EOI.select(0, expert);
        at::mm_out(dweight_OI, dy.t(), x);
      }
    }
    return {dx_RI, dweight_EOI, Tensor()};
  }
};

// Rows are added one after the other, in the order of the ids: the same bits at any number of threads.
class EmbeddingFunction : public torch::autograd::Function<EmbeddingFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& weight_VH, const Tensor& ids_T) {
    context->save_for_backward({weight_VH, ids_T});
    return weight_VH.index_select(0, ids_T);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor& weight_VH = saved[0];
    Tensor sum_VH = GradientToAddTo(weight_VH, gradients[0].scalar_type());
    const bool in_place = sum_VH.defined();
    if (!in_place) sum_VH = torch::zeros_like(weight_VH);
    sum_VH.index_add_(0, saved[1], gradients[0]);
    return {in_place ? Tensor() : sum_VH, Tensor()};
  }
};

}  // namespace

// One pass over the weight then, in place of three: writing the product into new memory, which the system has to clear first, reading it
// and adding.
Tensor GradientToAddTo(const Tensor& weight, torch::Dtype dtype) {
  if (!weight.is_leaf() || !weight.grad().defined() || weight.grad().scalar_type() != dtype) return {};
  return weight.grad();
}

Tensor Linear(const Tensor& x_TI, const Tensor& weight_OI, const Tensor& bias_O) {
  const torch::Dtype dtype = x_TI.scalar_type();
  return LinearFunction::apply(x_TI, weight_OI.to(dtype), bias_O.defined() ? std::optional<Tensor>(bias_O.to(dtype)) : std::nullopt);
}

void CheckOffsets(const Tensor& x_RI, const Tensor& weight_EOI, const std::vector<int64_t>& offsets) {
  TORCH_CHECK(static_cast<int64_t>(offsets.size()) == weight_EOI.size(0) + 1 && offsets.back() == x_RI.size(0), "offsets for ",
              offsets.size() - 1, " experts end at row ", offsets.back(), ", but there are ", weight_EOI.size(0), " experts and ",
              x_RI.size(0), " rows");
}

Tensor GroupedLinear(const Tensor& x_RI, const Tensor& weight_EOI, const std::vector<int64_t>& offsets) {
  CheckOffsets(x_RI, weight_EOI, offsets);
  return GroupedLinearFunction::apply(x_RI.contiguous(), weight_EOI.to(x_RI.scalar_type()), offsets);
}

Tensor Embedding(const Tensor& weight_VH, const Tensor& ids_T) { return EmbeddingFunction::apply(weight_VH, ids_T); }

}  // namespace moonpipe
