#include "moonpipe/model/decoder_part.h"

#include <algorithm>
#include <numeric>

#include "moonpipe/model/linear.h"
#include "moonpipe/model/media_scatter.h"
#include "moonpipe/model/norms.h"
#include "moonpipe/model/router.h"
#include "moonpipe/model/test_faults.h"

namespace moonpipe {

using torch::Tensor;

namespace {

// Undefined: all.
Tensor RowsToKeep(const DecoderInput& input) {
  if (input.logit_rows.defined()) return input.logit_rows;
  TORCH_CHECK(input.logits_to_keep >= 0, "logits_to_keep is ", input.logits_to_keep, ", it must be 0 for all rows or a number of rows");
  if (input.logits_to_keep == 0) return {};
  std::vector<int64_t> rows;
  int64_t end = 0;
  for (const int64_t length : input.document_lengths) {
    end += length;
    for (int64_t row = end - std::min(length, input.logits_to_keep); row < end; ++row) rows.push_back(row);
  }
  return torch::tensor(rows, torch::kLong);
}

}  // namespace

DecoderPart::DecoderPart(const ParameterStore& store)
    : config_(store.config().text),
      compute_(store.compute()),
      media_token_(store.config().vision.has_value() ? store.config().media_placeholder_token_id : -1),
      device_(store.parameters().front().value.device()) {
  const PartRange& range = store.range();
  if (range.has_embedding) embedding_ = store.Get(store.decoder_prefix() + "embed_tokens.weight");
  for (int64_t layer = range.first_layer; layer < range.end_layer; ++layer) layers_.emplace_back(store, layer);
  if (range.has_head) {
    final_norm_ = store.Get(store.decoder_prefix() + "norm.weight");
    head_ = store.HeadWeight();
  }
}

Tensor DecoderPart::Embed(const DecoderInput& input) const {
  const Tensor& ids_T = input.tokens_or_hidden;
  TORCH_CHECK(ids_T.dim() == 1 && ids_T.scalar_type() == torch::kLong, "the part with the embedding takes token ids, int64 [T], but got ",
              ids_T.scalar_type(), " ", ids_T.sizes());
  const Tensor embedded_TH = Embedding(embedding_, ids_T).to(compute_.dtype);
  if (media_token_ < 0) return embedded_TH;
  return ScatterMedia(embedded_TH, MediaPositions(ids_T, media_token_), input.features_MH);
}

RotaryTable DecoderPart::Rotary(const std::vector<int64_t>& document_lengths) {
  const int64_t longest = *std::max_element(document_lengths.begin(), document_lengths.end());
  if (!positions_.cos_T1d.defined() || positions_.cos_T1d.size(0) < longest) {
    positions_ = MakeRotaryTable(TextAngles(config_, std::max<int64_t>(longest, 256)));
    positions_ = {positions_.cos_T1d.to(device_), positions_.sin_T1d.to(device_)};
  }
  std::vector<int64_t> positions;
  for (const int64_t length : document_lengths) {
    positions.resize(positions.size() + static_cast<size_t>(length));
    std::iota(positions.end() - length, positions.end(), 0);
  }
  const Tensor positions_T = torch::tensor(positions, torch::kLong).to(device_);
  return {positions_.cos_T1d.index_select(0, positions_T), positions_.sin_T1d.index_select(0, positions_T)};
}

DecoderOutput DecoderPart::Forward(const DecoderInput& input) {
  std::vector<int64_t> spans = input.document_lengths;
  if (HasTestFault(TestFault::kNoDocumentMask)) spans = {std::accumulate(spans.begin(), spans.end(), int64_t{0})};
  const SpanLayout layout(std::move(spans), device_);
  const bool from_embeddings = input.embeddings_TH.defined();
  TORCH_CHECK(!from_embeddings || (embedding_.defined() && !input.tokens_or_hidden.defined() && !input.features_MH.defined()),
              "input embeddings go to the part with the embedding, and neither tokens nor features with them");
  const int64_t rows = from_embeddings ? input.embeddings_TH.size(0) : input.tokens_or_hidden.size(0);
  TORCH_CHECK(layout.num_rows() == rows && rows > 0, "documents of ", layout.num_rows(), " tokens in all, but the input has ", rows, " rows");
  const RotaryTable rotary = Rotary(input.document_lengths);
  // Edges carry fp32; a bf16 value passes unchanged.
  Tensor hidden_TH = (from_embeddings ? input.embeddings_TH : embedding_.defined() ? Embed(input) : input.tokens_or_hidden).to(compute_.dtype);
  TORCH_CHECK(hidden_TH.dim() == 2 && hidden_TH.size(1) == config_.hidden_size, "hidden states must be [T, ", config_.hidden_size,
              "], got ", hidden_TH.sizes());
  if (observer_ && embedding_.defined()) observer_("inputs_embeds", hidden_TH);

  DecoderOutput output;
  for (const DecoderLayer& layer : layers_) {
    LayerRecord record;
    hidden_TH = layer.Forward(hidden_TH, layout, rotary, {input.largest_logits, {input.balance_scale, Pinned(layer.layer())}}, &record, observer_);
    if (layer.has_experts()) output.loads.push_back({layer.layer(), record.experts.counts_E, record.experts.balance_loss});
    if (record.largest_logits_N.defined()) output.logits.push_back({layer.layer(), record.largest_logits_N});
  }
  if (head_.defined()) {
    const Tensor normed_TH = RmsNorm(hidden_TH, final_norm_, config_.rms_norm_eps, compute_.norm_rounding);
    if (input.last_hidden) output.last_hidden_TH = normed_TH;
    hidden_TH = Tensor();
    if (!input.skip_head || observer_) {
      const torch::AutoGradMode graph(at::GradMode::is_enabled() && !input.skip_head);
      const Tensor rows_K = RowsToKeep(input);
      hidden_TH = Linear(rows_K.defined() ? normed_TH.index_select(0, rows_K.to(device_)) : normed_TH, head_);
    }
    if (observer_) {
      observer_("norm", normed_TH);
      observer_("logits", hidden_TH);
    }
  }
  output.hidden_or_logits = hidden_TH;
  return output;
}

void DecoderPart::PinRouting(int64_t layer, const Tensor& indices_TK) {
  TORCH_CHECK(LayerOf(layer).has_experts(), "layer ", layer, " has no experts");
  pinned_TK_[layer] = indices_TK;
}

Tensor DecoderPart::Pinned(int64_t layer) const {
  const auto found = pinned_TK_.find(layer);
  return found == pinned_TK_.end() ? Tensor() : found->second;
}

const DecoderLayer& DecoderPart::LayerOf(int64_t layer) const {
  const auto found = std::find_if(layers_.begin(), layers_.end(), [&](const DecoderLayer& known) { return known.layer() == layer; });
  TORCH_CHECK(found != layers_.end(), "layer ", layer, " is not a layer of this part");
  return *found;
}

void DecoderPart::UpdateCorrection(int64_t layer, const Tensor& counts_E, double rate, BiasRule rule) {
  const DecoderLayer& found = LayerOf(layer);
  TORCH_CHECK(found.has_experts(), "layer ", layer, " has no experts");
  moonpipe::UpdateCorrection(found.experts().correction(), counts_E, rate, rule);
}

int64_t DecoderPart::ClipHeads(int64_t layer, const std::vector<double>& largest_logits_N, double threshold) {
  return LayerOf(layer).attention().ClipHeads(largest_logits_N, threshold);
}

}  // namespace moonpipe
