#include "moonpipe/model/experts.h"

#include "absl/strings/str_cat.h"
#include "moonpipe/model/activations.h"
#include "moonpipe/model/grouped_feed_forward.h"
#include "moonpipe/model/linear.h"
#include "moonpipe/model/rows.h"

namespace moonpipe {

using torch::Tensor;

FeedForward::FeedForward(const ParameterStore& store, const std::string& prefix)
    : gate_(store.Get(prefix + "gate_proj.weight")), up_(store.Get(prefix + "up_proj.weight")), down_(store.Get(prefix + "down_proj.weight")) {}

Tensor FeedForward::Forward(const Tensor& x_TH) const { return Linear(SwiGlu(Linear(x_TH, gate_), Linear(x_TH, up_)), down_); }

// A counting sort: stable by nature, and the row counts are needed on the host anyway to cut the slices.
ExpertPlan PlanExperts(const Tensor& indices_TK, int64_t experts) {
  const Tensor host = indices_TK.to(torch::kCPU).contiguous();
  const int64_t choices = host.size(1);
  const int64_t rows = host.numel();
  const int64_t* expert_of = host.data_ptr<int64_t>();
  ExpertPlan plan;
  plan.offsets.assign(static_cast<size_t>(experts) + 1, 0);
  for (int64_t i = 0; i < rows; ++i) plan.offsets[static_cast<size_t>(expert_of[i]) + 1] += 1;
  for (size_t e = 1; e < plan.offsets.size(); ++e) plan.offsets[e] += plan.offsets[e - 1];
  std::vector<int64_t> next(plan.offsets.begin(), plan.offsets.end() - 1);
  Tensor tables = torch::empty({3, rows}, torch::kLong);
  int64_t* token_of_row = tables.data_ptr<int64_t>();
  int64_t* row_of_choice = token_of_row + rows;
  int64_t* choice_of_row = row_of_choice + rows;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = next[static_cast<size_t>(expert_of[i])]++;
    token_of_row[row] = i / choices;
    row_of_choice[i] = row;
    choice_of_row[row] = i;
  }
  tables = tables.to(indices_TK.device());
  plan.token_of_row = tables.select(0, 0);
  plan.row_of_choice = tables.select(0, 1);
  plan.choice_of_row = tables.select(0, 2);
  return plan;
}

MixtureOfExperts::MixtureOfExperts(const ParameterStore& store, const std::string& prefix, int64_t layer)
    : config_(store.config().text),
      layer_(layer),
      loop_(store.compute().loop_experts),
      router_(store.Get(prefix + "gate.weight")),
      correction_(store.Get(prefix + "gate.e_score_correction_bias")),
      gate_(store.Get(prefix + "experts.gate_proj.weight")),
      up_(store.Get(prefix + "experts.up_proj.weight")),
      down_(store.Get(prefix + "experts.down_proj.weight")) {
  if (config_.n_shared_experts > 0) shared_.emplace_back(store, prefix + "shared_experts.");
}

Tensor MixtureOfExperts::Forward(const Tensor& x_TH, const std::vector<int64_t>& lengths, const ExpertOptions& options, ExpertRecord* record,
                                 const TensorObserver& observer) const {
  const Tensor logits_TE = Linear(x_TH.to(torch::kFloat), router_.to(torch::kFloat));
  const Routing routing = Route(config_, logits_TE, correction_, options.pinned_TK);
  const ExpertPlan plan = PlanExperts(routing.indices_TK, config_.n_routed_experts);
  if (record != nullptr) record->counts_E = torch::tensor(plan.offsets, torch::kLong).diff();
  if (observer) {
    const std::string prefix = absl::StrCat("router.layers.", layer_, ".");
    observer(prefix + "logits", logits_TE);
    observer(prefix + "indices", routing.indices_TK);
    observer(prefix + "weights", routing.weights_TK);
  }

  Tensor out_TH = loop_ ? LoopedExperts(x_TH, routing, plan) : SortedExperts(x_TH, routing, plan);
  if (!shared_.empty()) out_TH = out_TH + shared_.front().Forward(x_TH);
  if (options.balance_scale <= 0) return out_TH;
  const Tensor balance = BalanceLoss(config_, logits_TE, routing.indices_TK, lengths) * options.balance_scale;
  if (record != nullptr) record->balance_loss = balance.detach();
  return AttachLoss(out_TH, balance);
}

Tensor MixtureOfExperts::SortedExperts(const Tensor& x_TH, const Routing& routing, const ExpertPlan& plan) const {
  const int64_t choices = config_.num_experts_per_tok;
  const Tensor rows_RH = SpreadRows(x_TH, plan.token_of_row, plan.row_of_choice, choices);
  const Tensor outputs_RH = GroupedFeedForward(rows_RH, gate_, up_, down_, plan.offsets);
  // Back to token order; the weighted sum runs over a token's experts in ascending order, in fp32.
  const Tensor outputs_TKH = PermuteRows(outputs_RH, plan.row_of_choice, plan.choice_of_row).unflatten(0, {-1, choices});
  return (outputs_TKH.to(torch::kFloat) * routing.weights_TK.unsqueeze(-1)).sum(1).to(x_TH.scalar_type());
}

Tensor MixtureOfExperts::LoopedExperts(const Tensor& x_TH, const Routing& routing, const ExpertPlan& plan) const {
  // One gradient of the whole stack, not one a slice: experts without tokens add exact zeros.
  const std::vector<Tensor> gates = gate_.unbind(0), ups = up_.unbind(0), downs = down_.unbind(0);
  const Tensor weights = routing.weights_TK.flatten();
  Tensor routed_TH = torch::zeros_like(x_TH, torch::kFloat);
  for (size_t e = 0; e < gates.size(); ++e) {
    const int64_t rows = plan.offsets[e + 1] - plan.offsets[e];
    if (rows == 0) continue;
    const Tensor tokens = plan.token_of_row.narrow(0, plan.offsets[e], rows);
    const Tensor x = x_TH.index_select(0, tokens);
    const Tensor y = Linear(SwiGlu(Linear(x, gates[e]), Linear(x, ups[e])), downs[e]);
    const Tensor weight = weights.index_select(0, plan.choice_of_row.narrow(0, plan.offsets[e], rows)).unsqueeze(-1);
    routed_TH = routed_TH.index_add(0, tokens, y.to(torch::kFloat) * weight);
  }
  return routed_TH.to(x_TH.scalar_type());
}

}  // namespace moonpipe
