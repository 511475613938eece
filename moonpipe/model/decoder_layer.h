// One decoder layer: h += attention(norm(h)); h += feed_forward(norm(h)).
//
// Shapes: T tokens, H hidden, E experts.
#pragma once

#include <torch/torch.h>

#include <optional>
#include <vector>

#include "moonpipe/model/attention.h"
#include "moonpipe/model/experts.h"
#include "moonpipe/model/observer.h"
#include "moonpipe/model/parameter_store.h"

namespace moonpipe {

// What a forward does besides its output.
struct LayerOptions {
  bool largest_logits = false;  // records each head's largest attention logit
  ExpertOptions experts;
};
struct LayerRecord {
  ExpertRecord experts;            // left alone by dense layers
  torch::Tensor largest_logits_N;  // fp32 [heads]; undefined unless asked for
};

class DecoderLayer {
 public:
  DecoderLayer(const ParameterStore& store, int64_t layer);

  // The layer must outlive the graph.
  torch::Tensor Forward(const torch::Tensor& hidden_TH, const SpanLayout& layout, const RotaryTable& rotary, const LayerOptions& options,
                        LayerRecord* record, const TensorObserver& observer) const;

  int64_t layer() const { return layer_; }
  bool has_experts() const { return experts_.has_value(); }
  const MixtureOfExperts& experts() const { return *experts_; }
  const LatentAttention& attention() const { return attention_; }

 private:
  // The halves; `record` may be null.
  torch::Tensor Attend(const torch::Tensor& hidden_TH, const SpanLayout& layout, const RotaryTable& rotary, const LayerOptions& options,
                       LayerRecord* record, const TensorObserver& observer) const;
  torch::Tensor Feed(const torch::Tensor& middle_TH, const SpanLayout& layout, const LayerOptions& options, LayerRecord* record,
                     const TensorObserver& observer) const;

  int64_t layer_;
  Recompute recompute_;
  std::vector<torch::Tensor> weights_;  // all, to ask whether any is trained
  double eps_;
  NormRounding rounding_;
  torch::Tensor input_norm_;
  torch::Tensor post_attention_norm_;
  LatentAttention attention_;
  std::optional<FeedForward> dense_;
  std::optional<MixtureOfExperts> experts_;
};

}  // namespace moonpipe
