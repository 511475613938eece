#include "moonpipe/train/muon_parts.h"

#include "absl/strings/match.h"

namespace moonpipe {

bool TakesMuon(const TensorSpec& tensor) {
  if (!tensor.trainable || tensor.shape.size() != 2 || !absl::EndsWith(tensor.name, ".weight")) return false;
  for (const char* name : {"embed_tokens.weight", "lm_head.weight", ".mlp.gate.weight"}) {
    if (absl::EndsWith(tensor.name, name)) return false;
  }
  return !absl::StrContains(tensor.name, "patch_embed.");
}

std::vector<MatrixPart> MatrixParts(const ModelConfig& config, const TensorSpec& tensor) {
  const int64_t rows = tensor.shape.at(0);
  const TextConfig& text = config.text;
  if (absl::EndsWith(tensor.name, ".wqkv.weight")) {
    const int64_t third = rows / 3;
    return {{1, 0, third}, {1, third, third}, {1, 2 * third, third}};
  }
  if (absl::EndsWith(tensor.name, ".kv_a_proj_with_mqa.weight")) {
    return {{1, 0, text.kv_lora_rank}, {1, text.kv_lora_rank, text.qk_rope_head_dim}};
  }
  if (absl::EndsWith(tensor.name, ".kv_b_proj.weight")) {
    const int64_t heads = text.num_attention_heads;
    return {{heads, 0, text.qk_nope_head_dim}, {heads, text.qk_nope_head_dim, text.v_head_dim}};
  }
  return {{1, 0, rows}};
}

}  // namespace moonpipe
