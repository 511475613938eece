#include "moonpipe/model/attention.h"

#include <cmath>

#include "moonpipe/model/linear.h"
#include "moonpipe/model/norms.h"

namespace moonpipe {
namespace {

using torch::Tensor;

// The reference norms the latent vectors with this, whatever rms_norm_eps says.
constexpr double kLatentNormEps = 1e-6;

}  // namespace

LatentAttention::LatentAttention(const ParameterStore& store, const std::string& prefix) {
  const TextConfig& config = store.config().text;
  heads_ = config.num_attention_heads;
  nope_ = config.qk_nope_head_dim;
  rope_ = config.qk_rope_head_dim;
  value_ = config.v_head_dim;
  kv_rank_ = config.kv_lora_rank;
  scale_ = AttentionScale(config);
  rounding_ = store.compute().norm_rounding;
  in_steps_ = store.compute().explicit_attention;
  if (config.q_lora_rank.has_value()) {
    q_a_proj_ = store.Get(prefix + "q_a_proj.weight");
    q_a_norm_ = store.Get(prefix + "q_a_layernorm.weight");
    q_b_proj_ = store.Get(prefix + "q_b_proj.weight");
  } else {
    q_proj_ = store.Get(prefix + "q_proj.weight");
  }
  kv_a_proj_ = store.Get(prefix + "kv_a_proj_with_mqa.weight");
  kv_a_norm_ = store.Get(prefix + "kv_a_layernorm.weight");
  kv_b_proj_ = store.Get(prefix + "kv_b_proj.weight");
  o_proj_ = store.Get(prefix + "o_proj.weight");
}

Tensor LatentAttention::Query(const Tensor& x_TH) const {
  if (q_proj_.defined()) return Linear(x_TH, q_proj_);
  return Linear(RmsNorm(Linear(x_TH, q_a_proj_), q_a_norm_, kLatentNormEps, rounding_), q_b_proj_);
}

Tensor LatentAttention::Forward(const Tensor& x_TH, const SpanLayout& layout, const RotaryTable& rotary,
                                Tensor* largest_logits_N) const {
  const int64_t tokens = x_TH.size(0);
  const Tensor q_TNq = RotatePart(Query(x_TH).view({tokens, heads_, nope_ + rope_}), rotary, heads_, nope_);

  const std::vector<Tensor> latent = Linear(x_TH, kv_a_proj_).split_with_sizes({kv_rank_, rope_}, -1);
  const Tensor expanded_TNe = Linear(RmsNorm(latent[0], kv_a_norm_, kLatentNormEps, rounding_), kv_b_proj_).view({tokens, heads_, nope_ + value_});
  const std::vector<Tensor> expanded = expanded_TNe.split_with_sizes({nope_, value_}, -1);
  const Tensor shared_key_T1r = Rotate(latent[1].unsqueeze(1), rotary);
  const Tensor k_TNq = torch::cat({expanded[0], shared_key_T1r.expand({tokens, heads_, rope_})}, -1);

  const Tensor attended_TNv = SpanAttention(q_TNq, k_TNq, expanded[1], layout, /*causal=*/true, scale_, in_steps_);
  if (largest_logits_N != nullptr) *largest_logits_N = LargestCausalLogits(q_TNq, k_TNq, layout, scale_);
  return Linear(attended_TNv.reshape({tokens, heads_ * value_}), o_proj_);
}

int64_t LatentAttention::ClipHeads(const std::vector<double>& largest_logits_N, double threshold) const {
  TORCH_CHECK(static_cast<int64_t>(largest_logits_N.size()) == heads_, "largest logits of ", largest_logits_N.size(), " heads, the layer has ",
              heads_);
  const torch::NoGradGuard no_grad;
  const Tensor query = QueryRows().detach().unflatten(0, {heads_, nope_ + rope_});
  const Tensor key_and_value = kv_b_proj_.detach().unflatten(0, {heads_, nope_ + value_});
  int64_t clipped = 0;
  for (int64_t head = 0; head < heads_; ++head) {
    const double largest = largest_logits_N[static_cast<size_t>(head)];
    if (!(largest > threshold)) continue;
    const double factor = threshold / largest;
    query[head].narrow(0, 0, nope_).mul_(std::sqrt(factor));
    query[head].narrow(0, nope_, rope_).mul_(factor);
    key_and_value[head].narrow(0, 0, nope_).mul_(std::sqrt(factor));
    ++clipped;
  }
  return clipped;
}

}  // namespace moonpipe
