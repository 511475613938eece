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
  torch::Tensor balance_loss;  // fp32 scalar without a graph; undefined where none is asked for
};

struct ExpertOptions {
  double balance_scale = 0;      // above 0: the backward also minimises this times BalanceLoss
  torch::Tensor pinned_TK = {};  // chosen in place of the router's choices where defined, see DecoderPart::PinRouting
};

class MixtureOfExperts {
 public:
  // `prefix` ends in "mlp.".
  MixtureOfExperts(const ParameterStore& store, const std::string& prefix, int64_t layer);

  // Routed experts plus the shared one, [T, H]. `lengths` are the documents that the rows hold. `record` may be null.
  torch::Tensor Forward(const torch::Tensor& x_TH, const std::vector<int64_t>& lengths, const ExpertOptions& options, ExpertRecord* record,
                        const TensorObserver& observer) const;

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
  std::vector<FeedForward> shared_;  // one or none
};

}  // namespace moonpipe
