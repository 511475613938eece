#include "moonpipe/model/grouped_feed_forward.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "moonpipe/model/activations.h"
#include "moonpipe/model/linear.h"
#include "moonpipe/model/row_kernels.h"

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Slice {
  int64_t expert;
  int64_t first_row;
  int64_t rows;

  Tensor Of(const Tensor& x_RC) const { return x_RC.narrow(0, first_row, rows); }
};

// Experts with rows, the largest first, so that the last ones to be taken are short.
std::vector<Slice> SlicesOf(const std::vector<int64_t>& offsets) {
  std::vector<Slice> slices;
  for (size_t e = 0; e + 1 < offsets.size(); ++e) {
    if (offsets[e + 1] > offsets[e]) slices.push_back({static_cast<int64_t>(e), offsets[e], offsets[e + 1] - offsets[e]});
  }
  std::stable_sort(slices.begin(), slices.end(), [](const Slice& a, const Slice& b) { return a.rows > b.rows; });
  return slices;
}

// Calls function(slice) for all, each thread taking the next.
template <typename Function>
void ForAll(const std::vector<Slice>& slices, const Function& function) {
  std::atomic<size_t> next = 0;
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), static_cast<int64_t>(slices.size())), 1, [&](int64_t, int64_t) {
    const at::AutoDispatchBelowADInplaceOrView no_graph;
    for (size_t i = next++; i < slices.size(); i = next++) function(slices[i]);
  });
}

// Where the gradients of a stack of weights go: added to those that are there, or new.
class StackGradient {
 public:
  StackGradient(const Tensor& weight, bool trained, const std::vector<int64_t>& offsets) {
    if (!trained) return;
    sum_ = GradientToAddTo(weight, torch::kFloat);
    if (sum_.defined()) return;
    fresh_ = torch::empty_like(weight);
    for (size_t e = 0; e + 1 < offsets.size(); ++e) {
      if (offsets[e + 1] == offsets[e]) fresh_.select(0, static_cast<int64_t>(e)).zero_();
    }
  }
  void Add(int64_t expert, const Tensor& left, const Tensor& right) const {
    if (sum_.defined()) {
      sum_.select(0, expert).addmm_(left, right);
    } else if (fresh_.defined()) {
      Tensor slice = fresh_.select(0, expert);
      at::mm_out(slice, left, right);
    }
  }
  // For the engine: undefined where nothing is left to add.
  const Tensor& fresh() const { return fresh_; }

 private:
  Tensor sum_;
  Tensor fresh_;
};

class GroupedFeedForwardFunction : public torch::autograd::Function<GroupedFeedForwardFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x_RH, const Tensor& gate_EFH, const Tensor& up_EFH, const Tensor& down_EHF,
                        const std::vector<int64_t>& offsets) {
    Tensor gated_RF = torch::empty({x_RH.size(0), gate_EFH.size(1)}, x_RH.options());
    Tensor upped_RF = torch::empty_like(gated_RF);
    Tensor y_RH = torch::empty_like(x_RH);
    ForAll(SlicesOf(offsets), [&](const Slice& slice) {
      const Tensor x = slice.Of(x_RH);
      Tensor gated = slice.Of(gated_RF), upped = slice.Of(upped_RF), y = slice.Of(y_RH);
      at::mm_out(gated, x, gate_EFH.select(0, slice.expert).t());
      at::mm_out(upped, x, up_EFH.select(0, slice.expert).t());
      Tensor inner = torch::empty_like(gated);
      rows::SwiGlu(gated.const_data_ptr<float>(), upped.const_data_ptr<float>(), inner.numel(), inner.data_ptr<float>());
      at::mm_out(y, inner, down_EHF.select(0, slice.expert).t());
    });
    context->save_for_backward({x_RH, gate_EFH, up_EFH, down_EHF, gated_RF, upped_RF});
    context->saved_data["offsets"] = offsets;
    return y_RH;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &x_RH = saved[0], &gate_EFH = saved[1], &up_EFH = saved[2], &down_EHF = saved[3], &gated_RF = saved[4], &upped_RF = saved[5];
    const std::vector<int64_t> offsets = context->saved_data["offsets"].toIntVector();
    const Tensor dy_RH = gradients[0].contiguous();
    const StackGradient dgate(gate_EFH, context->needs_input_grad(1), offsets), dup(up_EFH, context->needs_input_grad(2), offsets),
        ddown(down_EHF, context->needs_input_grad(3), offsets);
    const bool trains_x = context->needs_input_grad(0);
    Tensor dx_RH = trains_x ? torch::empty_like(x_RH) : Tensor();
    ForAll(SlicesOf(offsets), [&](const Slice& slice) {
      const Tensor x = slice.Of(x_RH), dy = slice.Of(dy_RH), gated = slice.Of(gated_RF), upped = slice.Of(upped_RF);
      // The inner activation costs less to make again than to keep.
      Tensor inner = torch::empty_like(gated);
      rows::SwiGlu(gated.const_data_ptr<float>(), upped.const_data_ptr<float>(), inner.numel(), inner.data_ptr<float>());
      ddown.Add(slice.expert, dy.t(), inner);
      at::mm_out(inner, dy, down_EHF.select(0, slice.expert));
      Tensor dgated = torch::empty_like(gated), dupped = torch::empty_like(gated);
      rows::SwiGluGradient(gated.const_data_ptr<float>(), upped.const_data_ptr<float>(), inner.const_data_ptr<float>(), inner.numel(),
                           dgated.data_ptr<float>(), dupped.data_ptr<float>());
      dgate.Add(slice.expert, dgated.t(), x);
      dup.Add(slice.expert, dupped.t(), x);
      if (!trains_x) return;
      Tensor dx = slice.Of(dx_RH);
      at::mm_out(dx, dgated, gate_EFH.select(0, slice.expert));
      dx.addmm_(dupped, up_EFH.select(0, slice.expert));
    });
    return {dx_RH, dgate.fresh(), dup.fresh(), ddown.fresh(), Tensor()};
  }
};

}  // namespace

Tensor GroupedFeedForward(const Tensor& x_RH, const Tensor& gate_EFH, const Tensor& up_EFH, const Tensor& down_EHF,
                          const std::vector<int64_t>& offsets) {
  if (!IsPlain(x_RH) || gate_EFH.scalar_type() != torch::kFloat) {
    return GroupedLinear(SwiGlu(GroupedLinear(x_RH, gate_EFH, offsets), GroupedLinear(x_RH, up_EFH, offsets)), down_EHF, offsets);
  }
  CheckOffsets(x_RH, gate_EFH, offsets);
  return GroupedFeedForwardFunction::apply(x_RH.contiguous(), gate_EFH, up_EFH, down_EHF, offsets);
}

}  // namespace moonpipe
