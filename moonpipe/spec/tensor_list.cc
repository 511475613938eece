#include "moonpipe/spec/tensor_list.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace moonpipe {
namespace {

// The reference's truncated normal cuts at +-2 whatever the deviation, so at these deviations it practically never cuts.
constexpr double kLinearStd = 0.02;
constexpr double kLinearCut = 2.0;

class Lister {
 public:
  Lister(const ModelConfig& config, std::vector<TensorSpec>* out) : config_(config), out_(*out) {
    const bool nested = config.architecture != Architecture::kDeepseekV3;
    decoder_ = nested ? "language_model.model." : "model.";
    head_ = nested ? "language_model.lm_head.weight" : "lm_head.weight";
  }

  void Vision() {
    const VisionConfig& vision = *config_.vision;
    const int64_t width = vision.hidden_size;
    part_ = ModelPartKind::kVision;
    Linear("vision_tower.patch_embed.proj.weight", {width, 3, vision.patch_size, vision.patch_size}, kLinearStd);
    Add("vision_tower.patch_embed.proj.bias", {width}, Initializer::kZeros);
    Add("vision_tower.patch_embed.pos_emb.weight", {vision.init_pos_emb_height, vision.init_pos_emb_width, width}, Initializer::kNormal, 1);
    for (int64_t block = 0; block < vision.num_hidden_layers; ++block) {
      const std::string prefix = absl::StrCat("vision_tower.encoder.blocks.", block, ".");
      Norm(prefix + "norm0", width);
      Biased(prefix + "wqkv", 3 * width, width, kLinearStd);
      Biased(prefix + "wo", width, width, kLinearStd);
      Norm(prefix + "norm1", width);
      Biased(prefix + "mlp.fc0", vision.intermediate_size, width, kLinearStd);
      Biased(prefix + "mlp.fc1", width, vision.intermediate_size, kLinearStd);
    }
    Norm("vision_tower.encoder.final_layernorm", width);
  }

  void Projector() {
    const bool clips = config_.architecture == Architecture::kKimiK25;
    const std::string prefix = clips ? "mm_projector." : "multi_modal_projector.";
    const int64_t merged = config_.vision->merged_size();
    const double deviation = std::sqrt(2.0 / static_cast<double>(merged));
    part_ = ModelPartKind::kProjector;
    Norm(prefix + "pre_norm", config_.vision->hidden_size);
    Biased(prefix + (clips ? "proj.0" : "linear_1"), merged, merged, deviation);
    Biased(prefix + (clips ? "proj.2" : "linear_2"), config_.text.hidden_size, merged, deviation);
  }

  void Embedding() {
    part_ = ModelPartKind::kDecoder;
    Add(decoder_ + "embed_tokens.weight", {config_.text.vocab_size, config_.text.hidden_size}, Initializer::kNormal, 1);
  }

  void Layer(int64_t layer) {
    const TextConfig& text = config_.text;
    const int64_t hidden = text.hidden_size;
    const int64_t heads = text.num_attention_heads;
    // Matrices that write into the residual stream start smaller the deeper they stand.
    const double depth_std = kLinearStd / std::sqrt(2.0 * static_cast<double>(layer + 1));
    part_ = ModelPartKind::kDecoder;
    layer_ = layer;
    const std::string prefix = absl::StrCat(decoder_, "layers.", layer, ".");
    const std::string attention = prefix + "self_attn.";
    if (text.q_lora_rank.has_value()) {
      Linear(attention + "q_a_proj.weight", {*text.q_lora_rank, hidden}, kLinearStd);
      Add(attention + "q_a_layernorm.weight", {*text.q_lora_rank}, Initializer::kOnes);
      Linear(attention + "q_b_proj.weight", {heads * text.qk_head_dim(), *text.q_lora_rank}, kLinearStd);
    } else {
      Linear(attention + "q_proj.weight", {heads * text.qk_head_dim(), hidden}, kLinearStd);
    }
    Linear(attention + "kv_a_proj_with_mqa.weight", {text.kv_lora_rank + text.qk_rope_head_dim, hidden}, kLinearStd);
    Add(attention + "kv_a_layernorm.weight", {text.kv_lora_rank}, Initializer::kOnes);
    Linear(attention + "kv_b_proj.weight", {heads * (text.qk_nope_head_dim + text.v_head_dim), text.kv_lora_rank}, kLinearStd);
    Linear(attention + "o_proj.weight", {hidden, heads * text.v_head_dim}, depth_std);
    Add(prefix + "input_layernorm.weight", {hidden}, Initializer::kOnes);
    Add(prefix + "post_attention_layernorm.weight", {hidden}, Initializer::kOnes);
    if (!text.IsMoeLayer(layer)) {
      FeedForward(prefix + "mlp.", text.intermediate_size, depth_std);
    } else {
      Linear(prefix + "mlp.gate.weight", {text.n_routed_experts, hidden}, depth_std);
      Add(prefix + "mlp.gate.e_score_correction_bias", {text.n_routed_experts}, Initializer::kZeros);
      out_.back().trainable = false;
      if (text.n_shared_experts > 0) FeedForward(prefix + "mlp.shared_experts.", text.moe_intermediate_size * text.n_shared_experts, depth_std);
      for (expert_ = 0; expert_ < text.n_routed_experts; ++expert_) {
        FeedForward(absl::StrCat(prefix, "mlp.experts.", expert_, "."), text.moe_intermediate_size, depth_std);
      }
      expert_ = -1;
    }
    layer_ = -1;
  }

  void FinalNorm() {
    part_ = ModelPartKind::kDecoder;
    Add(decoder_ + "norm.weight", {config_.text.hidden_size}, Initializer::kOnes);
  }

  void Head() {
    part_ = ModelPartKind::kDecoder;
    const double deviation = 1.0 / std::sqrt(static_cast<double>(config_.text.hidden_size));
    Add(head_, {config_.text.vocab_size, config_.text.hidden_size}, Initializer::kTruncatedNormal, deviation, 3 * deviation);
  }

 private:
  void Add(std::string name, std::vector<int64_t> shape, Initializer initializer, double deviation = 0, double cut = 0) {
    TensorSpec spec;
    spec.name = std::move(name);
    spec.shape = std::move(shape);
    spec.part = part_;
    spec.layer = layer_;
    spec.expert = expert_;
    spec.initializer = initializer;
    spec.std = deviation;
    spec.cut = cut;
    out_.push_back(std::move(spec));
  }
  void Linear(std::string name, std::vector<int64_t> shape, double deviation) {
    Add(std::move(name), std::move(shape), Initializer::kTruncatedNormal, deviation, kLinearCut);
  }
  void Biased(const std::string& name, int64_t out, int64_t in, double deviation) {
    Linear(name + ".weight", {out, in}, deviation);
    Add(name + ".bias", {out}, Initializer::kZeros);
  }
  void Norm(const std::string& name, int64_t width) {
    Add(name + ".weight", {width}, Initializer::kOnes);
    Add(name + ".bias", {width}, Initializer::kZeros);
  }
  void FeedForward(const std::string& prefix, int64_t width, double depth_std) {
    Linear(prefix + "gate_proj.weight", {width, config_.text.hidden_size}, kLinearStd);
    Linear(prefix + "up_proj.weight", {width, config_.text.hidden_size}, depth_std);
    Linear(prefix + "down_proj.weight", {config_.text.hidden_size, width}, depth_std);
  }

  const ModelConfig& config_;
  std::vector<TensorSpec>& out_;
  std::string decoder_;
  std::string head_;
  ModelPartKind part_ = ModelPartKind::kDecoder;
  int64_t layer_ = -1;
  int64_t expert_ = -1;
};

}  // namespace

int64_t TensorSpec::num_elements() const {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

std::vector<TensorSpec> ListTensors(const ModelConfig& config) {
  PartRange all;
  all.end_layer = config.text.num_hidden_layers;
  all.has_embedding = all.has_head = true;
  all.has_vision = config.vision.has_value();
  return ListTensors(config, all);
}

std::vector<TensorSpec> ListTensors(const ModelConfig& config, const PartRange& range) {
  std::vector<TensorSpec> out;
  Lister lister(config, &out);
  if (range.has_vision && config.vision.has_value()) {
    lister.Vision();
    lister.Projector();
  }
  const bool tied = config.text.tie_word_embeddings;
  if (range.has_embedding || (range.has_head && tied)) lister.Embedding();
  for (int64_t layer = range.first_layer; layer < range.end_layer; ++layer) lister.Layer(layer);
  if (range.has_head) {
    lister.FinalNorm();
    if (!tied) lister.Head();
  }
  return out;
}

ParameterCounts CountParameters(const ModelConfig& config) {
  ParameterCounts counts;
  for (const TensorSpec& spec : ListTensors(config)) {
    const int64_t size = spec.num_elements();
    if (spec.part == ModelPartKind::kVision) {
      counts.vision += size;
    } else if (spec.part == ModelPartKind::kProjector) {
      counts.projector += size;
    } else {
      counts.decoder += size;
      if (spec.expert >= 0) counts.routed_experts += size;
    }
  }
  counts.embedding = config.text.vocab_size * config.text.hidden_size;
  if (!config.text.tie_word_embeddings) counts.head = counts.embedding;
  const int64_t routed = counts.routed_experts;
  counts.active_decoder = counts.decoder - routed + routed / config.text.n_routed_experts * config.text.num_experts_per_tok;
  return counts;
}

}  // namespace moonpipe
