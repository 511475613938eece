#include "moonpipe/model/decoder_layer.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "moonpipe/model/norms.h"
#include "moonpipe/model/recompute.h"

namespace moonpipe {
namespace {

std::string LayerPrefix(const ParameterStore& store, int64_t layer) { return absl::StrCat(store.decoder_prefix(), "layers.", layer, "."); }

}  // namespace

DecoderLayer::DecoderLayer(const ParameterStore& store, int64_t layer)
    : layer_(layer),
      recompute_(store.compute().recompute),
      eps_(store.config().text.rms_norm_eps),
      rounding_(store.compute().norm_rounding),
      input_norm_(store.Get(LayerPrefix(store, layer) + "input_layernorm.weight")),
      post_attention_norm_(store.Get(LayerPrefix(store, layer) + "post_attention_layernorm.weight")),
      attention_(store, LayerPrefix(store, layer) + "self_attn.") {
  const std::string prefix = LayerPrefix(store, layer) + "mlp.";
  if (store.config().text.IsMoeLayer(layer)) {
    experts_.emplace(store, prefix, layer);
  } else {
    dense_.emplace(store, prefix);
  }
  for (const Parameter& parameter : store.parameters()) {
    if (absl::StartsWith(parameter.name, LayerPrefix(store, layer))) weights_.push_back(parameter.value);
  }
}

torch::Tensor DecoderLayer::Forward(const torch::Tensor& hidden_TH, const SpanLayout& layout, const RotaryTable& rotary,
                                    const LayerOptions& options, LayerRecord* record, const TensorObserver& observer) const {
  if (recompute_ == Recompute::kNone) return Feed(Attend(hidden_TH, layout, rotary, options, record, observer), layout, options, record, observer);
  const bool trained = AnyTrained(weights_);
  LayerOptions silent = options;
  silent.largest_logits = false;
  if (recompute_ == Recompute::kExperts) {
    const torch::Tensor middle_TH = Attend(hidden_TH, layout, rotary, options, record, observer);
    return Recomputed(middle_TH, trained, [this, layout, silent, record, observer](const torch::Tensor& x_TH, bool again) {
      return Feed(x_TH, layout, silent, again ? nullptr : record, again ? TensorObserver() : observer);
    });
  }
  return Recomputed(hidden_TH, trained, [this, layout, rotary, options, silent, record, observer](const torch::Tensor& x_TH, bool again) {
    if (again) return Feed(Attend(x_TH, layout, rotary, silent, nullptr, {}), layout, silent, nullptr, {});
    return Feed(Attend(x_TH, layout, rotary, options, record, observer), layout, options, record, observer);
  });
}

torch::Tensor DecoderLayer::Attend(const torch::Tensor& hidden_TH, const SpanLayout& layout, const RotaryTable& rotary,
                                   const LayerOptions& options, LayerRecord* record, const TensorObserver& observer) const {
  const bool records_logits = options.largest_logits && attention_.clippable();
  const torch::Tensor attended_TH = attention_.Forward(RmsNorm(hidden_TH, input_norm_, eps_, rounding_), layout, rotary,
                                                       records_logits ? &record->largest_logits_N : nullptr);
  if (observer) observer(absl::StrCat("layers.", layer_, ".self_attn"), attended_TH);
  return hidden_TH + attended_TH;
}

torch::Tensor DecoderLayer::Feed(const torch::Tensor& middle_TH, const SpanLayout& layout, const LayerOptions& options, LayerRecord* record,
                                 const TensorObserver& observer) const {
  const torch::Tensor normed_TH = RmsNorm(middle_TH, post_attention_norm_, eps_, rounding_);
  const torch::Tensor fed_TH = dense_.has_value() ? dense_->Forward(normed_TH)
                                                  : experts_->Forward(normed_TH, layout.lengths(), options.experts,
                                                                      record == nullptr ? nullptr : &record->experts, observer);
  const torch::Tensor out_TH = middle_TH + fed_TH;
  if (observer) {
    observer(absl::StrCat("layers.", layer_, ".mlp"), fed_TH);
    observer(absl::StrCat("layers.", layer_), out_TH);
  }
  return out_TH;
}

}  // namespace moonpipe
