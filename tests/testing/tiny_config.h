// The smallest model that has every part of a Kimi-VL: two tower blocks whose position table is not the pictures' grid, projector, one
// dense and three expert layers. Fits the tokenizer of the digits.
#pragma once

#include <string>

#include "nlohmann/json.hpp"

namespace moonpipe {

inline nlohmann::json TinyConfig() {
  return nlohmann::json::parse(R"({
    "architectures": ["KimiVLForConditionalGeneration"],
    "model_type": "kimi_vl",
    "torch_dtype": "float32",
    "ignore_index": -100,
    "media_placeholder_token_id": 421,
    "pad_token_id": 423,
    "bos_token_id": 411,
    "eos_token_id": 412,
    "tie_word_embeddings": false,
    "text_config": {
      "architectures": ["DeepseekV3ForCausalLM"],
      "model_type": "deepseek_v3",
      "vocab_size": 448,
      "hidden_size": 32,
      "intermediate_size": 64,
      "moe_intermediate_size": 16,
      "num_hidden_layers": 4,
      "num_attention_heads": 2,
      "num_key_value_heads": 2,
      "n_shared_experts": 1,
      "n_routed_experts": 8,
      "routed_scaling_factor": 2.446,
      "kv_lora_rank": 16,
      "q_lora_rank": null,
      "qk_nope_head_dim": 8,
      "qk_rope_head_dim": 8,
      "v_head_dim": 8,
      "scoring_func": "sigmoid",
      "topk_method": "noaux_tc",
      "n_group": 1,
      "topk_group": 1,
      "num_experts_per_tok": 2,
      "moe_layer_freq": 1,
      "first_k_dense_replace": 1,
      "norm_topk_prob": true,
      "hidden_act": "silu",
      "max_position_embeddings": 2048,
      "rms_norm_eps": 1e-05,
      "rope_theta": 100.0,
      "rope_scaling": null,
      "tie_word_embeddings": false,
      "attention_bias": false,
      "pad_token_id": 423,
      "bos_token_id": 411,
      "eos_token_id": 412
    },
    "vision_config": {
      "model_type": "moonvit",
      "patch_size": 14,
      "init_pos_emb_height": 8,
      "init_pos_emb_width": 8,
      "num_attention_heads": 2,
      "num_hidden_layers": 2,
      "hidden_size": 32,
      "intermediate_size": 64,
      "merge_kernel_size": [2, 2]
    }
  })");
}

inline nlohmann::json TinyTiedConfig() {
  nlohmann::json config = TinyConfig();
  config["tie_word_embeddings"] = true;
  config["text_config"]["tie_word_embeddings"] = true;
  return config;
}

}  // namespace moonpipe
