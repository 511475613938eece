#include "moonpipe/model/rows.h"

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class PermuteFunction : public torch::autograd::Function<PermuteFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& order, const Tensor& inverse) {
    context->save_for_backward({inverse});
    return x.index_select(0, order);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0].index_select(0, context->get_saved_variables()[0]), Tensor(), Tensor()};
  }
};

class SpreadFunction : public torch::autograd::Function<SpreadFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x_TH, const Tensor& row_source, const Tensor& row_of_copy, int64_t copies) {
    context->save_for_backward({row_of_copy});
    context->saved_data["copies"] = copies;
    return x_TH.index_select(0, row_source);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const int64_t copies = context->saved_data["copies"].toInt();
    const Tensor by_copy = gradients[0].index_select(0, context->get_saved_variables()[0]).unflatten(0, {-1, copies});
    return {by_copy.sum(1, false, torch::kFloat).to(gradients[0].scalar_type()), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor PermuteRows(const Tensor& x, const Tensor& order, const Tensor& inverse) { return PermuteFunction::apply(x, order, inverse); }

Tensor SpreadRows(const Tensor& x_TH, const Tensor& row_source, const Tensor& row_of_copy, int64_t copies) {
  return SpreadFunction::apply(x_TH, row_source, row_of_copy, copies);
}

}  // namespace moonpipe
