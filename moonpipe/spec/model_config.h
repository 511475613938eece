// config.json of a Kimi-VL, Moonlight or Kimi K2.5 checkpoint, as numbers. No tensors, no LibTorch.
//
// Field names are the reference's own. Everything that the reference needs is required here: a missing field is an error that
// names its path, never a default. Optional fields and their defaults are those that the comments name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "moonpipe/spec/patch_order.h"

namespace moonpipe {

// Which key spelling the checkpoint uses and which projector follows the tower.
enum class Architecture { kKimiVl, kDeepseekV3, kKimiK25 };
// kimi_vl, deepseek_v3, kimi_k25: as model_type spells them.
absl::string_view ArchitectureName(Architecture architecture);

// YaRN; absent means plain rotary embeddings.
struct RopeScaling {
  double factor = 1;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 1;
  int64_t original_max_position_embeddings = 0;
};

// How the folder's weights are quantised (quantization_config, at the top or in text_config). Which tensors are is seen from the folder.
enum class QuantizationMethod {
  kInt4,  // compressed-tensors, pack-quantized: symmetric 4-bit integers with a scale for `group_size` values of a row
  kFp8,   // e4m3 with a scale for each block of `block_rows` x `block_columns`
};
struct Quantization {
  QuantizationMethod method = QuantizationMethod::kInt4;
  int64_t group_size = 32;
  int64_t block_rows = 128;
  int64_t block_columns = 128;
};

// The decoder (text_config, or the whole file for Moonlight).
struct TextConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  std::optional<int64_t> q_lora_rank;  // null: q_proj directly
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  int64_t intermediate_size = 0;
  int64_t moe_intermediate_size = 0;
  int64_t n_routed_experts = 0;
  int64_t num_experts_per_tok = 0;
  int64_t n_shared_experts = 0;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1;
  std::string scoring_func;  // "sigmoid"; anything else is refused
  int64_t first_k_dense_replace = 0;
  int64_t moe_layer_freq = 1;
  double rms_norm_eps = 0;
  double rope_theta = 0;
  std::optional<RopeScaling> rope_scaling;
  int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;

  int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  // Architecture section 2.5: layer i is MoE iff i >= first_k_dense_replace and i % moe_layer_freq == 0.
  bool IsMoeLayer(int64_t layer) const { return layer >= first_k_dense_replace && layer % moe_layer_freq == 0; }
};

// MoonViT (vision_config).
struct VisionConfig {
  int64_t patch_size = 0;
  int64_t init_pos_emb_height = 0;
  int64_t init_pos_emb_width = 0;
  int64_t init_pos_emb_time = 1;  // 4 for K2.5: clips of frames
  int64_t num_attention_heads = 0;
  int64_t num_hidden_layers = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t merge_height = 0;
  int64_t merge_width = 0;
  PatchOrder patch_order = PatchOrder::kRaster;  // optional; of the patches that the tower is given

  int64_t head_dim() const { return hidden_size / num_attention_heads; }
  // Values of one patch: channels x height x width.
  int64_t patch_values() const { return 3 * patch_size * patch_size; }
  int64_t merged_size() const { return hidden_size * merge_height * merge_width; }
};

struct ModelConfig {
  Architecture architecture = Architecture::kKimiVl;
  TextConfig text;
  std::optional<VisionConfig> vision;  // absent: a text-only model
  int64_t media_placeholder_token_id = -1;
  int64_t pad_token_id = -1;
  int64_t ignore_index = -100;  // the label of tokens that are not trained
  int64_t bos_token_id = -1;
  int64_t eos_token_id = -1;
  double projector_ln_eps = 1e-5;
  std::optional<Quantization> quantization;  // absent: plain weights
  std::string json;  // the file as it was read, written back untouched
};

// Reads the text of a config.json. INVALID_ARGUMENT lists every missing, mistyped or unsupported field by its path
// (`vision_config.patch_size`), all at once; a syntax error carries line and column, and comments are refused with them.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json);

// The same for a file; every message begins with the path.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& path);

// The text of a config.json without its quantization_config, which says nothing of weights that were decoded. A file that has none is
// returned as it is.
std::string WithoutQuantization(const std::string& json);

}  // namespace moonpipe
