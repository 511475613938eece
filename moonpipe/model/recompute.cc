#include "moonpipe/model/recompute.h"

#include <algorithm>
#include <utility>

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct HeldPiece : torch::CustomClassHolder {
  explicit HeldPiece(Piece held) : piece(std::move(held)) {}
  const Piece piece;
};

class RecomputedFunction : public torch::autograd::Function<RecomputedFunction> {
 public:
  // `anchor` wants a gradient where only weights within the piece do: the engine would not come by otherwise.
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& /*anchor*/, Piece piece) {
    const Tensor y = piece(x, /*again=*/false);
    context->save_for_backward({x});
    context->saved_data["piece"] = c10::IValue::make_capsule(c10::make_intrusive<HeldPiece>(std::move(piece)));
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto held = context->saved_data["piece"].toCapsule();
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_(context->needs_input_grad(0));
    const torch::AutoGradMode with_graph(true);
    const Tensor y = static_cast<const HeldPiece&>(*held).piece(x, /*again=*/true);
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor Recomputed(const Tensor& x, bool trained, Piece piece) {
  if (!at::GradMode::is_enabled() || (!trained && !x.requires_grad())) return piece(x, /*again=*/false);
  return RecomputedFunction::apply(x, torch::empty({0}, torch::kFloat).requires_grad_(trained), std::move(piece));
}

bool AnyTrained(const std::vector<Tensor>& weights) {
  return std::any_of(weights.begin(), weights.end(), [](const Tensor& weight) { return weight.requires_grad(); });
}

}  // namespace moonpipe
