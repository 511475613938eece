// The feed-forward blocks: one for dense layers and shared experts, and the routed mixture.
//
// Shapes: T tokens, H hidden, F inner width, E experts, K chosen per token, R = T * K rows sorted by expert.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "moonpipe/model/observer.h"
#include "moonpipe/model/parameter_store.h"
#include "moonpipe/model/router.h"

namespace moonpipe {

// down(silu(gate x) * up x).
class FeedForward {
 public:
  // `prefix` ends in "mlp." or "shared_experts.".
  FeedForward(const ParameterStore& store, const std::string& prefix);
  torch::Tensor Forward(const torch::Tensor& x_TH) const;

 private:
  torch::Tensor gate_;
  torch::Tensor up_;
  torch::Tensor down_;
};

// Where each (token, choice) goes: rows are sorted by expert, within an expert by token.
struct ExpertPlan {
  std::vector<int64_t> offsets;  // E + 1: rows of expert e are offsets[e] .. offsets[e + 1]
  torch::Tensor token_of_row;    // int64 [R]
  torch::Tensor row_of_choice;   // int64 [R], at token * K + choice
  torch::Tensor choice_of_row;   // int64 [R], its inverse
};
// Reads the indices on the host.
ExpertPlan PlanExperts(const torch::Tensor& indices_TK, int64_t experts);

// What a forward of a layer's experts shows besides its output.
struct ExpertRecord {
  torch::Tensor counts_E;      // tokens of each expert, int64 [E] on the host
  torch::Tensor balance_loss;  // fp32 scalar without a graph; undefined where there is none
};

class MixtureOfExperts {
 public:
  // `prefix` ends in "mlp.".
  MixtureOfExperts(const ParameterStore& store, const std::string& prefix, int64_t layer);

  // Routed experts plus the shared one, [T, H]. `lengths` are the documents that the rows hold. With `balance_scale` above 0 and a graph, the
  // backward also minimises balance_scale * BalanceLoss. `record` may be null.
  torch::Tensor Forward(const torch::Tensor& x_TH, const std::vector<int64_t>& lengths, double balance_scale, ExpertRecord* record,
                        const TensorObserver& observer) const;

  // See DecoderPart::PinRouting.
  void Pin(const torch::Tensor& indices_TK) { pinned_TK_ = indices_TK; }

  const torch::Tensor& correction() const { return correction_; }

 private:
  torch::Tensor SortedExperts(const torch::Tensor& x_TH, const Routing& routing, const ExpertPlan& plan) const;
  torch::Tensor LoopedExperts(const torch::Tensor& x_TH, const Routing& routing, const ExpertPlan& plan) const;

  const TextConfig config_;
  int64_t layer_;
  bool loop_;
  torch::Tensor router_;
  torch::Tensor correction_;
  torch::Tensor gate_;
  torch::Tensor up_;
  torch::Tensor down_;
  torch::Tensor pinned_TK_;  // undefined: the router chooses
  std::vector<FeedForward> shared_;  // one or none
};

}  // namespace moonpipe
