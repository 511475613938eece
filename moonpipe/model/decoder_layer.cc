#include "moonpipe/model/decoder_layer.h"

#include "absl/strings/str_cat.h"
#include "moonpipe/model/norms.h"

namespace moonpipe {
namespace {

std::string LayerPrefix(const ParameterStore& store, int64_t layer) { return absl::StrCat(store.decoder_prefix(), "layers.", layer, "."); }

}  // namespace

DecoderLayer::DecoderLayer(const ParameterStore& store, int64_t layer)
    : layer_(layer),
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
}

torch::Tensor DecoderLayer::Forward(const torch::Tensor& hidden_TH, const SpanLayout& layout, const RotaryTable& rotary,
                                    const LayerOptions& options, LayerRecord* record, const TensorObserver& observer) const {
  const bool records_logits = options.largest_logits && attention_.clippable();
  const torch::Tensor attended_TH = attention_.Forward(RmsNorm(hidden_TH, input_norm_, eps_, rounding_), layout, rotary,
                                                       records_logits ? &record->largest_logits_N : nullptr);
  const torch::Tensor middle_TH = hidden_TH + attended_TH;
  const torch::Tensor normed_TH = RmsNorm(middle_TH, post_attention_norm_, eps_, rounding_);
  const torch::Tensor fed_TH =
      dense_.has_value() ? dense_->Forward(normed_TH)
                         : experts_->Forward(normed_TH, layout.lengths(), options.balance_scale, &record->experts, observer);
  const torch::Tensor out_TH = middle_TH + fed_TH;
  if (observer) {
    const std::string name = absl::StrCat("layers.", layer_);
    observer(name + ".self_attn", attended_TH);
    observer(name + ".mlp", fed_TH);
    observer(name, out_TH);
  }
  return out_TH;
}

}  // namespace moonpipe
