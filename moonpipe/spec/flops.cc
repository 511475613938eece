#include "moonpipe/spec/flops.h"

#include "absl/strings/match.h"

namespace moonpipe {
namespace {

absl::int128 Product(int64_t a, int64_t b) { return absl::int128(a) * b; }

// What the counts need of a step; a step is a sum over its microbatches.
struct Work {
  absl::int128 tokens = 0;
  absl::int128 squared_lengths = 0;  // of documents
  absl::int128 patches = 0;
  absl::int128 squared_patches = 0;  // of pictures
  absl::int128 feature_rows = 0;
};

Work WorkOf(const data::v1::StepManifest& manifest) {
  Work work;
  for (const data::v1::MicrobatchManifest& microbatch : manifest.microbatches()) {
    work.tokens += microbatch.tokens();
    for (const uint32_t length : microbatch.document_lengths()) work.squared_lengths += Product(length, length);
    for (const common::v1::MediaGrid& grid : microbatch.grids()) {
      const int64_t patches = int64_t{grid.frames()} * grid.rows() * grid.columns();
      work.patches += patches;
      work.squared_patches += Product(patches, patches);
    }
    work.feature_rows += microbatch.feature_rows();
  }
  return work;
}

// Forward, and what of the backward a part does: both gradients, the input's alone, or none.
int Passes(bool frozen, bool trained_ahead) { return frozen ? (trained_ahead ? 2 : 1) : 3; }

}  // namespace

FrozenParts FindFrozenParts(const ModelConfig& config, const std::vector<TensorSpec>& tensors, const std::vector<bool>& moves) {
  FrozenParts frozen{true, true, true, true, true, std::vector<bool>(static_cast<size_t>(config.text.num_hidden_layers), true)};
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!moves[i]) continue;
    const TensorSpec& tensor = tensors[i];
    if (tensor.part == ModelPartKind::kVision) {
      frozen.vision = false;
    } else if (tensor.part == ModelPartKind::kProjector) {
      frozen.projector = false;
    } else if (tensor.layer >= 0) {
      frozen.layers[static_cast<size_t>(tensor.layer)] = false;
    } else if (absl::StrContains(tensor.name, "embed_tokens")) {
      frozen.embedding = false;
      if (config.text.tie_word_embeddings) frozen.head = false;
    } else if (absl::StrContains(tensor.name, "lm_head")) {
      frozen.head = false;
    }
    if (tensor.part == ModelPartKind::kDecoder) frozen.decoder = false;
  }
  return frozen;
}

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
  PartRange all;
  all.end_layer = config.text.num_hidden_layers;
  all.has_embedding = all.has_head = all.has_vision = true;
  return CountTrainingFlops(config, all, manifest, frozen);
}

StepFlops CountTrainingFlops(const ModelConfig& config, const PartRange& range, const data::v1::StepManifest& manifest,
                             const FrozenParts& frozen) {
  const Work work = WorkOf(manifest);
  const TextConfig& text = config.text;
  StepFlops flops;
  if (range.has_vision && config.vision.has_value()) {
    const VisionConfig& vision = *config.vision;
    const absl::int128 tower = 2 * work.patches * VisionWeights(vision) +
                               4 * work.squared_patches * Product(vision.num_hidden_layers, vision.hidden_size);
    flops.vision = tower * Passes(frozen.vision, false);
    flops.projector = 2 * work.feature_rows * ProjectorWeights(config) * Passes(frozen.projector, !frozen.vision);
  }
  // In the order of the forward: does anything before this layer want a gradient?
  bool trained_ahead = config.vision.has_value() && !(frozen.vision && frozen.projector);
  trained_ahead = trained_ahead || !(frozen.decoder || frozen.embedding);
  // len^2 / 2 pairs at 2 FLOPs each of the two products.
  const absl::int128 attention = work.squared_lengths * Product(text.num_attention_heads, text.qk_head_dim() + text.v_head_dim);
  for (int64_t layer = 0; layer < range.end_layer; ++layer) {
    const bool layer_frozen = frozen.decoder || (!frozen.layers.empty() && frozen.layers[static_cast<size_t>(layer)]);
    if (layer >= range.first_layer) {
      const absl::int128 forward = 2 * work.tokens * ActiveLayerWeights(text, layer) + attention;
      flops.decoder += forward * Passes(layer_frozen, trained_ahead);
    }
    trained_ahead = trained_ahead || !layer_frozen;
  }
  if (range.has_head) {
    flops.decoder += 2 * work.tokens * Product(text.vocab_size, text.hidden_size) *
                     Passes(frozen.decoder || frozen.head, trained_ahead);
  }
  return flops;
}

}  // namespace moonpipe
