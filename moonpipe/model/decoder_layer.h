// One decoder layer: h += attention(norm(h)); h += feed_forward(norm(h)).
//
// Shapes: T tokens, H hidden, E experts.
#pragma once

#include <torch/torch.h>

#include <optional>

#include "moonpipe/model/attention.h"
#include "moonpipe/model/experts.h"
#include "moonpipe/model/observer.h"
#include "moonpipe/model/parameter_store.h"

namespace moonpipe {

class DecoderLayer {
 public:
  DecoderLayer(const ParameterStore& store, int64_t layer);

  // `counts_E` is set by layers with experts and left alone by dense ones; it may be null.
  torch::Tensor Forward(const torch::Tensor& hidden_TH, const SpanLayout& layout, const RotaryTable& rotary, torch::Tensor* counts_E,
                        const TensorObserver& observer) const;

  int64_t layer() const { return layer_; }
  bool has_experts() const { return experts_.has_value(); }
  const MixtureOfExperts& experts() const { return *experts_; }
  MixtureOfExperts& experts() { return *experts_; }

 private:
  int64_t layer_;
  double eps_;
  torch::Tensor input_norm_;
  torch::Tensor post_attention_norm_;
  LatentAttention attention_;
  std::optional<FeedForward> dense_;
  std::optional<MixtureOfExperts> experts_;
};

}  // namespace moonpipe
