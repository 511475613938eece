#include "moonpipe/spec/flops.h"

namespace moonpipe {
namespace {

// Products in double: a step of a large model exceeds 64 bits. Below 2^53 every number here is exact.
double Product(int64_t a, int64_t b) { return static_cast<double>(a) * static_cast<double>(b); }

// FLOPs of the forward of one microbatch.
StepFlops ForwardFlops(const ModelConfig& config, const data::v1::MicrobatchManifest& microbatch) {
  StepFlops flops;
  const TextConfig& text = config.text;
  flops.decoder = 2 * Product(ActiveDecoderWeights(text), microbatch.tokens());
  double pairs = 0;
  for (uint32_t length : microbatch.document_lengths()) pairs += Product(length, length) / 2;
  const int64_t width = text.num_attention_heads * (text.qk_head_dim() + text.v_head_dim);
  flops.decoder += 2 * Product(text.num_hidden_layers, width) * pairs;
  if (!config.vision.has_value()) return flops;

  const VisionConfig& vision = *config.vision;
  for (const common::v1::MediaGrid& grid : microbatch.grids()) {
    const int64_t patches = int64_t{grid.frames()} * grid.rows() * grid.columns();
    flops.vision += 2 * Product(VisionWeights(vision), patches);
    flops.vision += 4 * Product(vision.num_hidden_layers, vision.hidden_size) * Product(patches, patches);
  }
  flops.projector = 2 * Product(ProjectorWeights(config), microbatch.feature_rows());
  return flops;
}

}  // namespace

int64_t ActiveLayerWeights(const TextConfig& text, int64_t layer) {
  const int64_t hidden = text.hidden_size;
  const int64_t query = text.num_attention_heads * text.qk_head_dim();
  int64_t weights = text.q_lora_rank.has_value() ? *text.q_lora_rank * (hidden + query) : hidden * query;
  weights += hidden * (text.kv_lora_rank + text.qk_rope_head_dim);
  weights += text.kv_lora_rank * text.num_attention_heads * (text.qk_nope_head_dim + text.v_head_dim);
  weights += text.num_attention_heads * text.v_head_dim * hidden;
  if (!text.IsMoeLayer(layer)) return weights + 3 * hidden * text.intermediate_size;
  weights += hidden * text.n_routed_experts;
  return weights + 3 * hidden * text.moe_intermediate_size * (text.num_experts_per_tok + text.n_shared_experts);
}

int64_t ActiveDecoderWeights(const TextConfig& text) {
  int64_t weights = text.vocab_size * text.hidden_size;
  for (int64_t layer = 0; layer < text.num_hidden_layers; ++layer) weights += ActiveLayerWeights(text, layer);
  return weights;
}

int64_t VisionWeights(const VisionConfig& vision) {
  const int64_t block = 4 * vision.hidden_size * vision.hidden_size + 2 * vision.hidden_size * vision.intermediate_size;
  return vision.patch_values() * vision.hidden_size + vision.num_hidden_layers * block;
}

int64_t ProjectorWeights(const ModelConfig& config) {
  if (!config.vision.has_value()) return 0;
  const int64_t merged = config.vision->merged_size();
  return merged * (merged + config.text.hidden_size);
}

StepFlops CountTrainingFlops(const ModelConfig& config, const data::v1::StepManifest& manifest,
                             const FrozenParts& frozen) {
  StepFlops flops;
  for (const data::v1::MicrobatchManifest& microbatch : manifest.microbatches()) {
    const StepFlops forward = ForwardFlops(config, microbatch);
    flops.vision += forward.vision;
    flops.projector += forward.projector;
    flops.decoder += forward.decoder;
  }
  const bool trained_ahead_of_projector = config.vision.has_value() && !frozen.vision;
  const bool trained_ahead_of_decoder = config.vision.has_value() && !(frozen.vision && frozen.projector);
  flops.vision *= frozen.vision ? 1 : 3;
  flops.projector *= frozen.projector ? (trained_ahead_of_projector ? 2 : 1) : 3;
  flops.decoder *= frozen.decoder ? (trained_ahead_of_decoder ? 2 : 1) : 3;
  return flops;
}

}  // namespace moonpipe
