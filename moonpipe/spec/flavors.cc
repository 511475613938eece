#include "moonpipe/spec/flavors.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/nearest_name.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

// Values of the published files; architecture sections 2.1 and 2.2.
constexpr char kKimiVl[] = R"({
  "architectures": ["KimiVLForConditionalGeneration"],
  "model_type": "kimi_vl",
  "torch_dtype": "bfloat16",
  "ignore_index": -100,
  "media_placeholder_token_id": 163605,
  "bos_token_id": 163584,
  "eos_token_id": 163585,
  "pad_token_id": 163839,
  "tie_word_embeddings": false,
  "text_config": {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": null,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": true,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "rope_theta": 800000.0,
    "rope_scaling": null,
    "max_position_embeddings": 131072,
    "aux_loss_alpha": 0.001,
    "seq_aux": true,
    "ep_size": 1,
    "initializer_range": 0.02,
    "tie_word_embeddings": false,
    "attention_bias": false,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839
  },
  "vision_config": {
    "model_type": "moonvit",
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "merge_kernel_size": [2, 2]
  }
}
)";

constexpr char kMoonlight[] = R"({
  "architectures": ["DeepseekV3ForCausalLM"],
  "model_type": "deepseek_v3",
  "torch_dtype": "bfloat16",
  "vocab_size": 163840,
  "hidden_size": 2048,
  "num_hidden_layers": 27,
  "num_attention_heads": 16,
  "num_key_value_heads": 16,
  "q_lora_rank": null,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "intermediate_size": 11264,
  "moe_intermediate_size": 1408,
  "first_k_dense_replace": 1,
  "moe_layer_freq": 1,
  "n_routed_experts": 64,
  "num_experts_per_tok": 6,
  "n_shared_experts": 2,
  "n_group": 1,
  "topk_group": 1,
  "topk_method": "noaux_tc",
  "scoring_func": "sigmoid",
  "norm_topk_prob": true,
  "routed_scaling_factor": 2.446,
  "rms_norm_eps": 1e-05,
  "hidden_act": "silu",
  "rope_theta": 50000.0,
  "rope_scaling": null,
  "max_position_embeddings": 8192,
  "aux_loss_alpha": 0.001,
  "seq_aux": true,
  "ep_size": 1,
  "initializer_range": 0.02,
  "tie_word_embeddings": false,
  "attention_bias": false,
  "num_nextn_predict_layers": 0,
  "bos_token_id": 163584,
  "eos_token_id": 163585,
  "pad_token_id": 163839
}
)";

// Without the published quantization_config: fresh weights are not quantised.
constexpr char kKimiK25[] = R"({
  "architectures": ["KimiK25ForConditionalGeneration"],
  "model_type": "kimi_k25",
  "dtype": "bfloat16",
  "ignore_index": -100,
  "media_placeholder_token_id": 163605,
  "bos_token_id": 163584,
  "eos_token_id": 163585,
  "pad_token_id": 163839,
  "tie_word_embeddings": false,
  "use_unified_vision_chunk": true,
  "video_placeholder": "<|kimi_k25_video_placeholder|>",
  "text_config": {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": true,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "rope_theta": 50000.0,
    "rope_scaling": {
      "type": "yarn",
      "factor": 64.0,
      "beta_fast": 32.0,
      "beta_slow": 1.0,
      "mscale": 1.0,
      "mscale_all_dim": 1.0,
      "original_max_position_embeddings": 4096
    },
    "max_position_embeddings": 262144,
    "num_nextn_predict_layers": 0,
    "attention_bias": false,
    "aux_loss_alpha": 0.001,
    "seq_aux": true,
    "ep_size": 1,
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "tie_word_embeddings": false,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839
  },
  "vision_config": {
    "patch_size": 14,
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "vt_num_hidden_layers": 27,
    "vt_num_attention_heads": 16,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 1152,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 7168
  }
}
)";

// Architecture section 2.6, table A.
constexpr char kDebugKimiVl[] = R"({
  "architectures": ["KimiVLForConditionalGeneration"],
  "model_type": "kimi_vl",
  "torch_dtype": "float32",
  "ignore_index": -100,
  "media_placeholder_token_id": 421,
  "bos_token_id": 411,
  "eos_token_id": 412,
  "pad_token_id": 423,
  "tie_word_embeddings": false,
  "text_config": {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": null,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 160,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": true,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "rope_theta": 800000.0,
    "rope_scaling": null,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": false,
    "attention_bias": false,
    "bos_token_id": 411,
    "eos_token_id": 412,
    "pad_token_id": 423
  },
  "vision_config": {
    "model_type": "moonvit",
    "patch_size": 14,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "merge_kernel_size": [2, 2]
  }
}
)";

constexpr char kDebugMoonlight[] = R"({
  "architectures": ["DeepseekV3ForCausalLM"],
  "model_type": "deepseek_v3",
  "torch_dtype": "float32",
  "vocab_size": 512,
  "hidden_size": 64,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "q_lora_rank": null,
  "kv_lora_rank": 32,
  "qk_nope_head_dim": 16,
  "qk_rope_head_dim": 8,
  "v_head_dim": 16,
  "intermediate_size": 160,
  "moe_intermediate_size": 32,
  "first_k_dense_replace": 1,
  "moe_layer_freq": 1,
  "n_routed_experts": 8,
  "num_experts_per_tok": 3,
  "n_shared_experts": 2,
  "n_group": 1,
  "topk_group": 1,
  "topk_method": "noaux_tc",
  "scoring_func": "sigmoid",
  "norm_topk_prob": true,
  "routed_scaling_factor": 2.446,
  "rms_norm_eps": 1e-05,
  "hidden_act": "silu",
  "rope_theta": 50000.0,
  "rope_scaling": null,
  "max_position_embeddings": 8192,
  "tie_word_embeddings": false,
  "attention_bias": false,
  "bos_token_id": 411,
  "eos_token_id": 412,
  "pad_token_id": 423
}
)";

// Architecture section 2.6, table B.
constexpr char kDebugKimiK25[] = R"({
  "architectures": ["KimiK25ForConditionalGeneration"],
  "model_type": "kimi_k25",
  "dtype": "float32",
  "ignore_index": -100,
  "media_placeholder_token_id": 421,
  "bos_token_id": 411,
  "eos_token_id": 412,
  "pad_token_id": 423,
  "tie_word_embeddings": false,
  "text_config": {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 160,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": true,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "rope_theta": 50000.0,
    "rope_scaling": {
      "type": "yarn",
      "factor": 4.0,
      "beta_fast": 32.0,
      "beta_slow": 1.0,
      "mscale": 1.0,
      "mscale_all_dim": 1.0,
      "original_max_position_embeddings": 64
    },
    "max_position_embeddings": 256,
    "tie_word_embeddings": false,
    "attention_bias": false,
    "bos_token_id": 411,
    "eos_token_id": 412,
    "pad_token_id": 423
  },
  "vision_config": {
    "patch_size": 14,
    "vt_hidden_size": 48,
    "vt_intermediate_size": 96,
    "vt_num_hidden_layers": 2,
    "vt_num_attention_heads": 4,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 48,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 64
  }
}
)";

std::string Bare(absl::string_view name) {
  std::string bare;
  for (const char c : absl::AsciiStrToLower(name)) {
    if (c != '-' && c != '_' && c != '.') bare += c;
  }
  return bare;
}

}  // namespace

const std::vector<Flavor>& Flavors() {
  static const auto* const flavors = new std::vector<Flavor>{
      {"kimi-vl-a3b", {}, kKimiVl},
      {"moonlight-16b-a3b", {}, kMoonlight},
      {"kimi-k2.5", {"kimi-k2.6", "kimi-k2.7", "kimi-k2.7-code"}, kKimiK25},
      {"debug-kimi-vl", {}, kDebugKimiVl},
      {"debug-moonlight", {}, kDebugMoonlight},
      {"debug-kimi-k2.5", {}, kDebugKimiK25},
  };
  return *flavors;
}

absl::StatusOr<const Flavor*> FindFlavor(absl::string_view name) {
  const std::string wanted = Bare(name);
  std::vector<std::string> known;
  for (const Flavor& flavor : Flavors()) {
    if (Bare(flavor.name) == wanted) return &flavor;
    known.push_back(flavor.name);
    for (const std::string& alias : flavor.aliases) {
      if (Bare(alias) == wanted) return &flavor;
      known.push_back(alias);
    }
  }
  const std::vector<std::string> near = NearestNames(absl::AsciiStrToLower(name), known, 3);
  return absl::InvalidArgumentError(absl::StrCat(
      "no flavor is named \"", name, "\"; ",
      near.empty() ? absl::StrCat("known are ", absl::StrJoin(known, ", ")) : absl::StrCat("did you mean ", absl::StrJoin(near, " or "), "?")));
}

absl::StatusOr<ModelConfig> ReadModelOf(const cluster::v1::ModelSpec& model) {
  if (model.has_flavor()) {
    MOONPIPE_ASSIGN_OR_RETURN(const Flavor* flavor, FindFlavor(model.flavor()));
    return ParseModelConfig(flavor->config_json);
  }
  return ReadModelConfig(model.has_path() ? model.path() + "/config.json" : model.config());
}

}  // namespace moonpipe
