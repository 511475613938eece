#include "tests/testing/stored_layouts.h"

#include <regex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace moonpipe::testing {
namespace {

using torch::Tensor;

constexpr int64_t kGroup = 32;
constexpr int64_t kBlock = 128;

bool IsRoutedExpert(const std::string& name) { return std::regex_search(name, std::regex(R"(\.experts\.\d+\.)")); }

void Rename(const std::string& pattern, const std::string& by, StoredTensors* tensors) {
  StoredTensors renamed;
  for (const auto& [name, tensor] : *tensors) renamed[std::regex_replace(name, std::regex(pattern), by)] = tensor;
  *tensors = std::move(renamed);
}

// Adjacent pairs to halves, head by head.
Tensor HalfSplit(const Tensor& rows, int64_t heads) {
  std::vector<int64_t> shape = rows.sizes().vec();
  std::vector<int64_t> paired = {heads, shape[0] / heads / 2, 2};
  paired.insert(paired.end(), shape.begin() + 1, shape.end());
  return rows.reshape(paired).transpose(1, 2).reshape(shape).contiguous();
}

void SplitQkv(const std::string& leaf_q, const std::string& leaf_k, const std::string& leaf_v, int64_t permuted_heads, StoredTensors* tensors) {
  StoredTensors split;
  for (const auto& [name, tensor] : *tensors) {
    const size_t at = name.find("wqkv.");
    if (at == std::string::npos) {
      split[name] = tensor;
      continue;
    }
    const std::vector<Tensor> parts = tensor.chunk(3, 0);
    const std::string prefix = name.substr(0, at), kind = name.substr(at + 4);
    split[prefix + leaf_q + kind] = permuted_heads > 0 ? HalfSplit(parts[0], permuted_heads) : parts[0].contiguous();
    split[prefix + leaf_k + kind] = permuted_heads > 0 ? HalfSplit(parts[1], permuted_heads) : parts[1].contiguous();
    split[prefix + leaf_v + kind] = parts[2].contiguous();
  }
  *tensors = std::move(split);
}

void StackExperts(bool fuse, const std::string& gate, const std::string& up, const std::string& down, int64_t experts, StoredTensors* tensors) {
  StoredTensors stacked;
  const std::regex expert(R"(^(.*\.experts\.)0\.gate_proj\.weight$)");
  for (const auto& [name, tensor] : *tensors) {
    std::smatch match;
    if (!IsRoutedExpert(name)) {
      stacked[name] = tensor;
    } else if (std::regex_match(name, match, expert)) {
      const std::string prefix = match[1];
      std::vector<Tensor> gates, ups, downs;
      for (int64_t e = 0; e < experts; ++e) {
        gates.push_back(tensors->at(absl::StrCat(prefix, e, ".gate_proj.weight")));
        ups.push_back(tensors->at(absl::StrCat(prefix, e, ".up_proj.weight")));
        downs.push_back(tensors->at(absl::StrCat(prefix, e, ".down_proj.weight")));
      }
      if (fuse) {
        stacked[prefix + gate] = torch::cat({torch::stack(gates), torch::stack(ups)}, 1);
      } else {
        stacked[prefix + gate] = torch::stack(gates);
        stacked[prefix + up] = torch::stack(ups);
      }
      stacked[prefix + down] = torch::stack(downs);
    }
  }
  *tensors = std::move(stacked);
}

void ToBFloat16(StoredTensors* tensors) {
  for (auto& [name, tensor] : *tensors) {
    if (!absl::EndsWith(name, "e_score_correction_bias")) tensor = tensor.to(torch::kBFloat16);
  }
}

struct Packed {
  Tensor codes;  // [rows, columns], -8 to 7
  Tensor scale;  // bf16 [rows, groups]
};
Packed PackInt4(const Tensor& weight) {
  const int64_t rows = weight.size(0), columns = weight.size(1), groups = (columns + kGroup - 1) / kGroup;
  const Tensor padded = torch::constant_pad_nd(weight, {0, groups * kGroup - columns}).view({rows, groups, kGroup});
  const Tensor scale = (padded.abs().amax(2) / 7).to(torch::kBFloat16);
  const Tensor codes = (padded / scale.to(torch::kFloat).unsqueeze(2)).round().clamp(-8, 7).to(torch::kInt).to(torch::kFloat).view({rows, -1}).narrow(1, 0, columns);
  return {codes.contiguous(), scale};
}

Tensor UnpackInt4(const Packed& packed) {
  const Tensor scale = packed.scale.repeat_interleave(kGroup, 1).narrow(1, 0, packed.codes.size(1));
  return (packed.codes.to(torch::kBFloat16) * scale).to(torch::kFloat);
}

Tensor BlockScale(const Tensor& weight) {
  const int64_t rows = (weight.size(0) + kBlock - 1) / kBlock, columns = (weight.size(1) + kBlock - 1) / kBlock;
  Tensor scale = torch::empty({rows, columns});
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const Tensor block = weight.slice(0, r * kBlock, (r + 1) * kBlock).slice(1, c * kBlock, (c + 1) * kBlock);
      scale[r][c] = block.abs().max() / 448;
    }
  }
  return scale;
}

Tensor Spread(const Tensor& scale, const Tensor& weight) {
  return scale.repeat_interleave(kBlock, 0).repeat_interleave(kBlock, 1).slice(0, 0, weight.size(0)).slice(1, 0, weight.size(1));
}

}  // namespace

std::vector<std::string> LayoutNames() {
  return {"published",    "other-projector", "split-qkv",    "linear-patches", "stacked-gate-up", "stacked-apart", "stacked-w",
          "native",       "native-stacked",  "bf16",         "native-bf16",    "int4",            "fp8"};
}

StoredTensors InLayout(const std::string& layout, const StoredTensors& published, const ModelConfig& config) {
  StoredTensors tensors = published;
  const int64_t experts = config.text.n_routed_experts;
  if (layout == "other-projector") {
    const bool k25 = config.architecture == Architecture::kKimiK25;
    if (k25) {
      Rename(R"(^mm_projector\.proj\.0)", "multi_modal_projector.linear_1", &tensors);
      Rename(R"(^mm_projector\.proj\.2)", "multi_modal_projector.linear_2", &tensors);
      Rename(R"(^mm_projector)", "multi_modal_projector", &tensors);
    } else {
      Rename(R"(^multi_modal_projector\.linear_1)", "mm_projector.proj.0", &tensors);
      Rename(R"(^multi_modal_projector\.linear_2)", "mm_projector.proj.2", &tensors);
      Rename(R"(^multi_modal_projector)", "mm_projector", &tensors);
    }
  } else if (layout == "split-qkv") {
    SplitQkv("wq", "wk", "wv", 0, &tensors);
  } else if (layout == "linear-patches") {
    const auto patches = tensors.find("vision_tower.patch_embed.proj.weight");
    if (patches != tensors.end()) patches->second = patches->second.flatten(1);
  } else if (layout == "stacked-gate-up") {
    StackExperts(true, "gate_up_proj", "", "down_proj", experts, &tensors);
  } else if (layout == "stacked-apart") {
    StackExperts(false, "gate_proj.weight", "up_proj.weight", "down_proj.weight", experts, &tensors);
  } else if (layout == "stacked-w") {
    StackExperts(false, "w1", "w3", "w2", experts, &tensors);
  } else if (absl::StartsWith(layout, "native")) {
    if (layout == "native-stacked") StackExperts(true, "gate_up_proj", "", "down_proj", experts, &tensors);
    if (config.vision.has_value()) {
      SplitQkv("attn.q_proj", "attn.k_proj", "attn.v_proj", config.vision->num_attention_heads, &tensors);
      Rename(R"(\.wo\.)", ".attn.proj.", &tensors);
      // Upwards, or the second would take the first along.
      Rename(R"((blocks\.\d+\.)norm1\.)", "$1norm2.", &tensors);
      Rename(R"((blocks\.\d+\.)norm0\.)", "$1norm1.", &tensors);
      Rename(R"((blocks\.\d+\.mlp\.)fc1\.)", "$1fc2.", &tensors);
      Rename(R"((blocks\.\d+\.mlp\.)fc0\.)", "$1fc1.", &tensors);
      Rename(R"(vision_tower\.encoder\.blocks\.)", "vision_tower.layers.", &tensors);
      Rename(R"(vision_tower\.encoder\.)", "vision_tower.", &tensors);
      Rename(R"(pos_emb\.weight$)", "pos_emb.position_embeddings", &tensors);
      Rename(R"(^vision_tower)", "model.vision_tower", &tensors);
      Rename(R"(^(mm_projector|multi_modal_projector)\.pre_norm)", "model.mm_projector.pre_norm", &tensors);
      Rename(R"(^mm_projector\.proj\.0|^multi_modal_projector\.linear_1)", "model.mm_projector.in_proj", &tensors);
      Rename(R"(^mm_projector\.proj\.2|^multi_modal_projector\.linear_2)", "model.mm_projector.out_proj", &tensors);
      Rename(R"(^language_model\.lm_head)", "lm_head", &tensors);
      Rename(R"(^language_model\.model)", "model.language_model", &tensors);
    }
  }
  if (absl::EndsWith(layout, "bf16")) ToBFloat16(&tensors);
  if (layout == "int4") {
    StoredTensors quantised;
    for (const auto& [name, tensor] : tensors) {
      if (!IsRoutedExpert(name)) {
        quantised[name] = tensor;
        continue;
      }
      const Packed packed = PackInt4(tensor);
      const Tensor nibbles = torch::constant_pad_nd((packed.codes + 8).to(torch::kLong), {0, (8 - tensor.size(1) % 8) % 8}).view({tensor.size(0), -1, 8});
      // 2^31 and more wrap round to negative words.
      const Tensor words = (nibbles * torch::pow(16, torch::arange(8))).sum(2);
      quantised[name + "_packed"] = torch::where(words >= int64_t{1} << 31, words - (int64_t{1} << 32), words).to(torch::kInt);
      quantised[name + "_scale"] = packed.scale;
      quantised[name + "_shape"] = torch::tensor({tensor.size(0), tensor.size(1)}).to(torch::kInt);
    }
    tensors = std::move(quantised);
    for (auto& [name, tensor] : tensors) {
      if (tensor.scalar_type() == torch::kFloat && !absl::EndsWith(name, "e_score_correction_bias")) tensor = tensor.to(torch::kBFloat16);
    }
  } else if (layout == "fp8") {
    StoredTensors quantised;
    for (const auto& [name, tensor] : tensors) {
      if (IsRoutedExpert(name) || absl::StrContains(name, "self_attn.o_proj")) {
        const Tensor scale = BlockScale(tensor);
        quantised[name] = (tensor / Spread(scale, tensor)).to(torch::kFloat8_e4m3fn);
        quantised[name + "_scale_inv"] = scale;
      } else {
        quantised[name] = absl::EndsWith(name, "e_score_correction_bias") ? tensor : tensor.to(torch::kBFloat16);
      }
    }
    tensors = std::move(quantised);
  }
  for (auto& [name, tensor] : tensors) tensor = tensor.contiguous();
  return tensors;
}

StoredTensors Decoded(const std::string& layout, const StoredTensors& published, const ModelConfig& config) {
  StoredTensors decoded = published;
  if (absl::EndsWith(layout, "bf16") || layout == "int4" || layout == "fp8") ToBFloat16(&decoded);
  for (auto& [name, tensor] : decoded) tensor = tensor.to(torch::kFloat);
  const StoredTensors stored = InLayout(layout, published, config);
  for (auto& [name, tensor] : decoded) {
    if (layout == "int4" && IsRoutedExpert(name)) tensor = UnpackInt4(PackInt4(published.at(name)));
    if (layout == "fp8" && stored.count(name + "_scale_inv") > 0) {
      tensor = (stored.at(name).to(torch::kFloat) * Spread(stored.at(name + "_scale_inv"), tensor)).to(torch::kBFloat16).to(torch::kFloat);
    }
  }
  return decoded;
}

nlohmann::json ConfigInLayout(const std::string& layout, nlohmann::json config) {
  nlohmann::json& holder = config.contains("text_config") && layout == "int4" ? config["text_config"] : config;
  if (layout == "int4") {
    holder["quantization_config"] = nlohmann::json::parse(R"({
      "quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": null, "quantization_status": "compressed",
      "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null, "output_activations": null,
        "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32, "dynamic": false, "actorder": null}}},
      "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]})");
  } else if (layout == "fp8") {
    holder["quantization_config"] = nlohmann::json::parse(
        R"({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})");
  }
  return config;
}

}  // namespace moonpipe::testing
