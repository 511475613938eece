// Multi-head latent attention (architecture section 4.2), with and without the low-rank query.
//
// Shapes: T tokens, H hidden, N heads, R kv_lora_rank, q width of query and key (nope + rope), v width of the value.
#pragma once

#include <torch/torch.h>

#include <string>

#include "moonpipe/model/parameter_store.h"
#include "moonpipe/model/rope.h"
#include "moonpipe/model/span_attention.h"

namespace moonpipe {

class LatentAttention {
 public:
  // `prefix` ends in "self_attn.". Keeps handles to the store's parameters.
  LatentAttention(const ParameterStore& store, const std::string& prefix);

  // x_TH [T, H], already normed -> [T, H]. Documents are the spans of `layout`; `rotary` has the angles of each token's position.
  torch::Tensor Forward(const torch::Tensor& x_TH, const SpanLayout& layout, const RotaryTable& rotary) const;

 private:
  torch::Tensor Query(const torch::Tensor& x_TH) const;

  int64_t heads_;
  int64_t nope_;
  int64_t rope_;
  int64_t value_;
  int64_t kv_rank_;
  double scale_;
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
