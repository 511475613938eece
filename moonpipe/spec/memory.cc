#include "moonpipe/spec/memory.h"

#include <algorithm>

namespace moonpipe {
namespace {

constexpr int64_t kFloatBytes = 4;

// Values that the backward of one decoder layer needs, per token.
int64_t LayerValues(const TextConfig& text, int64_t layer) {
  const int64_t hidden = text.hidden_size;
  const int64_t query = text.num_attention_heads * text.qk_head_dim();
  const int64_t value = text.num_attention_heads * text.v_head_dim;
  // Both residual inputs and both normed copies.
  int64_t values = 4 * hidden;
  // Queries, keys and padded values as attention reads them, its output at the padded and the true width, its log-sums.
  values += 4 * query + value + text.num_attention_heads;
  if (text.q_lora_rank.has_value()) values += 2 * *text.q_lora_rank;
  // The compressed keys and values before and after their norm, and what they are expanded to.
  values += text.kv_lora_rank + text.qk_rope_head_dim + text.kv_lora_rank;
  values += text.num_attention_heads * (text.qk_nope_head_dim + text.v_head_dim);
  // A gated feed-forward keeps gate, up, the activated gate and the product.
  if (!text.IsMoeLayer(layer)) return values + 4 * text.intermediate_size;
  values += 2 * text.n_routed_experts;
  values += text.num_experts_per_tok * (2 * hidden + 4 * text.moe_intermediate_size);
  return values + 4 * text.n_shared_experts * text.moe_intermediate_size;
}

// Values that the backward of the tower and the projector needs, per patch.
int64_t PatchValues(const VisionConfig& vision) {
  // Per block: two residual inputs, two normed copies, q, k, v, attention output, and twice the inner width around the
  // activation.
  const int64_t block = 8 * vision.hidden_size + 2 * vision.intermediate_size + vision.num_attention_heads;
  // The merged row is shared by merge_height * merge_width patches, so its width per patch is hidden_size: normed
  // input, inner, activated.
  return vision.patch_values() + vision.num_hidden_layers * block + 4 * vision.hidden_size;
}

}  // namespace

MemoryEstimate EstimateMemory(const ModelConfig& config, const PartRange& range, const MemoryOptions& options) {
  MemoryEstimate estimate;
  int64_t trained = -options.frozen_parameters;
  for (const TensorSpec& tensor : ListTensors(config, range)) {
    estimate.parameters += tensor.num_elements();
    if (tensor.trainable) trained += tensor.num_elements();
  }
  trained = std::max<int64_t>(trained, 0);
  estimate.weights_bytes = kFloatBytes * estimate.parameters;
  estimate.gradients_bytes = kFloatBytes * trained;
  estimate.optimizer_bytes = 2 * kFloatBytes * trained;

  int64_t values = 0;
  for (int64_t layer = range.first_layer; layer < range.end_layer; ++layer) values += LayerValues(config.text, layer);
  if (range.has_embedding) values += config.text.hidden_size;
  if (range.has_head) values += 2 * config.text.hidden_size;
  if (range.has_vision && config.vision.has_value()) {
    const int64_t patches_per_token = config.vision->merge_height * config.vision->merge_width;
    values += patches_per_token * PatchValues(*config.vision) + config.text.hidden_size;
  }
  estimate.activations_bytes = kFloatBytes * options.microbatch_tokens * values * options.live_microbatches;
  // Logits live from the head's forward to its backward only; their probabilities become the gradient.
  if (range.has_head)
    estimate.activations_bytes += 2 * kFloatBytes * options.microbatch_tokens * config.text.vocab_size;
  return estimate;
}

}  // namespace moonpipe
