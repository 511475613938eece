// Multi-head latent attention (architecture section 4.2), with and without the low-rank query.
//
// Shapes: T tokens, H hidden, N heads, R kv_lora_rank, q width of query and key (nope + rope), v width of the value.
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "moonpipe/model/parameter_store.h"
#include "moonpipe/model/rope.h"
#include "moonpipe/model/span_attention.h"

namespace moonpipe {

class LatentAttention {
 public:
  // `prefix` ends in "self_attn.". Keeps handles to the store's parameters.
  LatentAttention(const ParameterStore& store, const std::string& prefix);

  // x_TH [T, H], already normed -> [T, H]. Documents are the spans of `layout`; `rotary` has the angles of each token's position. Where
  // `largest_logits_N` is not null it becomes each head's largest logit before the softmax, fp32 [N]; no logit is kept otherwise.
  torch::Tensor Forward(const torch::Tensor& x_TH, const SpanLayout& layout, const RotaryTable& rotary,
                        torch::Tensor* largest_logits_N = nullptr) const;

  // QK-clip (Kimi K2's report): for each head whose largest logit S exceeds `threshold`, with g = threshold / S, the rows of W_q and W_k of
  // its part without positions are multiplied by sqrt(g) and its rotary query rows by g, so that every logit of the head shrinks by g. The
  // rotary key is shared by all heads and stays. Rows of W_q are those of q_b_proj where the query has a low rank. Returns the number of
  // heads that were scaled.
  int64_t ClipHeads(const std::vector<double>& largest_logits_N, double threshold) const;
  // Both matrices that ClipHeads scales are trained.
  bool clippable() const { return QueryRows().requires_grad() && kv_b_proj_.requires_grad(); }

 private:
  torch::Tensor Query(const torch::Tensor& x_TH) const;
  // The weight whose rows are the heads' queries.
  const torch::Tensor& QueryRows() const { return q_proj_.defined() ? q_proj_ : q_b_proj_; }

  int64_t heads_;
  int64_t nope_;
  int64_t rope_;
  int64_t value_;
  int64_t kv_rank_;
  double scale_;
  NormRounding rounding_;
  bool in_steps_;
  // Either q_proj, or the three of the low-rank query.
  torch::Tensor q_proj_;
  torch::Tensor q_a_proj_;
  torch::Tensor q_a_norm_;
  torch::Tensor q_b_proj_;
  torch::Tensor kv_a_proj_;
  torch::Tensor kv_a_norm_;
  torch::Tensor kv_b_proj_;
  torch::Tensor o_proj_;
};

}  // namespace moonpipe
