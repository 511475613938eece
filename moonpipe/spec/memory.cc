#include "moonpipe/spec/memory.h"

#include <algorithm>
#include <utility>

namespace moonpipe {
namespace {

constexpr int64_t kFloatBytes = 4;
// An int64 index in values of fp32.
constexpr int64_t kIndex = 2;

// Values for one token, of what one device keeps or passes.
struct Values {
  int64_t kept = 0;           // until the backward
  int64_t kept_sequence = 0;  // keys and values: of all tokens of the microbatch also where the tokens are shared
  int64_t passing = 0;        // most at one time in the backward, beyond what is kept
  int64_t passing_sequence = 0;
};

// Of a feed-forward block: gate, up and the product.
int64_t GatedValues(int64_t inner) { return 3 * inner; }

Values LayerValues(const TextConfig& text, int64_t layer, const ParallelSizes& parallel, Recompute recompute) {
  const int64_t hidden = text.hidden_size;
  const int64_t heads = text.num_attention_heads / parallel.tensor;
  const int64_t width = text.qk_head_dim();
  Values values;
  // The residual input with its norm's output and inverse.
  values.kept = 2 * hidden + 1;
  if (text.q_lora_rank.has_value()) values.kept += 2 * *text.q_lora_rank + 1;
  // Queries, attention's output, its log-sums.
  values.kept += heads * (width + text.v_head_dim + 1);
  // The latent vector before and after its norm; keys as attention reads them, values where they were expanded together with keys.
  const int64_t expanded = text.qk_nope_head_dim + text.v_head_dim;
  values.kept_sequence = 2 * text.kv_lora_rank + 1 + heads * (width + expanded);
  // Gradients of the output, of queries, keys and values, and of the latter two together.
  const int64_t attention_passing = heads * (2 * width + 2 * text.v_head_dim + expanded);

  // The middle with its norm's output and inverse, and what follows.
  int64_t fed = 2 * hidden + 1;
  if (!text.IsMoeLayer(layer)) {
    const int64_t inner = text.intermediate_size / parallel.tensor;
    fed += GatedValues(inner);
    values.passing = hidden + 3 * inner;
  } else {
    const int64_t choices = text.num_experts_per_tok;
    const int64_t inner = text.moe_intermediate_size / parallel.tensor;
    // Scores, the chosen, their weights before and after normalisation, and the tables of the rows.
    fed += text.n_routed_experts + kIndex * choices + 3 * choices + 1 + 3 * kIndex * choices;
    // The rows of the experts at both ends; gate and up, whose product is made again.
    fed += choices * (2 * hidden + 2 * inner);
    if (text.n_shared_experts > 0) fed += GatedValues(text.n_shared_experts * inner);
    values.passing = hidden + choices * 2 * hidden;
  }
  if (recompute == Recompute::kNone) {
    values.kept += fed;
    values.passing = std::max(attention_passing, values.passing);
    return values;
  }
  // The middle is where the second half begins again; then that half is there whole.
  const int64_t fed_passing = fed - hidden + values.passing;
  if (recompute == Recompute::kExperts) {
    values.kept += hidden;
    values.passing = std::max(attention_passing, fed_passing);
    return values;
  }
  // Of the whole layer its input is kept.
  values.passing = values.kept + std::max(attention_passing, fed_passing);
  values.passing_sequence = std::exchange(values.kept_sequence, 0);
  values.kept = hidden;
  return values;
}

// Of the tower, per patch.
Values PatchValues(const VisionConfig& vision, Recompute recompute) {
  const int64_t width = vision.hidden_size;
  Values values;
  // Per block: residual input and middle, each with its norm's output, mean and deviation; rotated queries and keys with the values;
  // attention's output and log-sums; the inner width around the activation.
  const int64_t block = 2 * (2 * width + 2) + 3 * width + width + vision.num_attention_heads + 2 * vision.intermediate_size;
  // Pixels, and after the last block: input of the last norm, windows, their norm, and around the projector's activation.
  const bool again = recompute == Recompute::kLayers;
  values.kept = vision.patch_values() + vision.num_hidden_layers * (again ? width : block) + 5 * width + 4;
  values.passing = std::max(2 * vision.intermediate_size, 6 * width) + (again ? block - width : 0);
  return values;
}

}  // namespace

Recompute RecomputeOf(absl::string_view name) {
  return name == "layers" ? Recompute::kLayers : name == "experts" ? Recompute::kExperts : Recompute::kNone;
}

MemoryEstimate EstimateMemory(const ModelConfig& config, const PartRange& range, const MemoryOptions& options) {
  MemoryEstimate estimate;
  const ParallelSizes& parallel = options.parallel;
  const TextConfig& text = config.text;
  int64_t trained = -options.frozen_parameters;
  for (const TensorSpec& tensor : ListTensors(config, range)) {
    const int64_t elements = ElementsPerDevice(tensor, parallel);
    estimate.parameters += elements;
    if (tensor.trainable) trained += elements;
  }
  trained = std::max<int64_t>(trained, 0);
  // A tied head has gradients of its own.
  const bool tied_head = text.tie_word_embeddings && range.has_head;
  const int64_t vocabulary = text.vocab_size / parallel.tensor;
  estimate.weights_bytes = kFloatBytes * estimate.parameters;
  estimate.gradients_bytes = kFloatBytes * options.gradient_groups * (trained + (tied_head ? vocabulary * text.hidden_size : 0));
  estimate.optimizer_bytes = kFloatBytes * (2 * trained - options.one_moment_parameters);

  const int64_t sequence = options.microbatch_tokens;
  const int64_t tokens = sequence / parallel.context;
  int64_t kept = 0;
  int64_t passing = 0;
  if (range.end_layer > range.first_layer) kept += 2 * text.qk_rope_head_dim * tokens;  // the positions' cosines and sines
  for (int64_t layer = range.first_layer; layer < range.end_layer; ++layer) {
    const Values values = LayerValues(text, layer, parallel, options.recompute);
    kept += tokens * values.kept + sequence * values.kept_sequence;
    passing = std::max(passing, tokens * values.passing + sequence * values.passing_sequence);
  }
  if (range.has_embedding) kept += kIndex * tokens;
  if (range.has_head) {
    // Input of the last norm and its output.
    kept += (2 * text.hidden_size + 1) * tokens;
  }
  if (range.has_vision && config.vision.has_value()) {
    const int64_t window = config.vision->merge_height * config.vision->merge_width;
    const int64_t patches = options.patches >= 0 ? options.patches : sequence * window;
    const Values values = PatchValues(*config.vision, options.recompute);
    // The features live until their gradient has come.
    kept += patches * values.kept + patches / window * text.hidden_size;
    passing = std::max(passing, patches * values.passing);
  }
  kept *= options.live_microbatches;
  int64_t working = passing;
  if (range.has_head) {
    // In the loss: the trained rows and their gradient, the gradient of the head's weight, and a block's logits with their exponentials.
    working = std::max(working, 2 * text.hidden_size * tokens + vocabulary * (text.hidden_size + 2 * std::min(tokens, kLossRows)));
  }
  estimate.activations_bytes = kFloatBytes * kept;
  estimate.working_bytes = kFloatBytes * working;
  return estimate;
}

}  // namespace moonpipe
