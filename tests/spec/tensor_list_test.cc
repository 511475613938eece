#include "moonpipe/spec/tensor_list.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/spec/safetensors.h"

namespace moonpipe {
namespace {

ModelConfig Recorded(const std::string& name) { return *ReadModelConfig(absl::StrCat(TEST_DATA_DIR, "/fixtures/", name, "/config.json")); }

// The published sizes.
ModelConfig Published(Architecture architecture) {
  ModelConfig config;
  config.architecture = architecture;
  TextConfig& text = config.text;
  text.vocab_size = 163840;
  text.qk_nope_head_dim = 128;
  text.qk_rope_head_dim = 64;
  text.v_head_dim = 128;
  text.kv_lora_rank = 512;
  text.first_k_dense_replace = 1;
  if (architecture == Architecture::kKimiK25) {
    text.hidden_size = 7168;
    text.num_hidden_layers = 61;
    text.num_attention_heads = 64;
    text.q_lora_rank = 1536;
    text.intermediate_size = 18432;
    text.moe_intermediate_size = 2048;
    text.n_routed_experts = 384;
    text.num_experts_per_tok = 8;
    text.n_shared_experts = 1;
  } else {
    text.hidden_size = 2048;
    text.num_hidden_layers = 27;
    text.num_attention_heads = 16;
    text.intermediate_size = 11264;
    text.moe_intermediate_size = 1408;
    text.n_routed_experts = 64;
    text.num_experts_per_tok = 6;
    text.n_shared_experts = 2;
  }
  if (architecture != Architecture::kDeepseekV3) {
    config.vision = VisionConfig{14, 64, 64, 1, 16, 27, 1152, 4304, 2, 2};
  }
  return config;
}

TEST(TensorListTest, CountsEqualThePublishedTotals) {
  EXPECT_EQ(CountParameters(Published(Architecture::kDeepseekV3)).total(), 15'960'110'208);
  const ParameterCounts kimi_vl = CountParameters(Published(Architecture::kKimiVl));
  EXPECT_EQ(kimi_vl.vision, 416'866'032);
  EXPECT_EQ(kimi_vl.projector, 30'679'808);
  EXPECT_EQ(kimi_vl.total(), 16'407'656'048);
  EXPECT_NEAR(static_cast<double>(kimi_vl.active_decoder), 2.91e9, 0.01e9);
  EXPECT_EQ(kimi_vl.embedding, int64_t{163840} * 2048);
  const ParameterCounts k25 = CountParameters(Published(Architecture::kKimiK25));
  EXPECT_EQ(k25.projector, 54'277'888);
  EXPECT_EQ(k25.total(), 1'026'879'376'368);
  EXPECT_NEAR(static_cast<double>(k25.active_decoder), 32.86e9, 0.01e9);
}

TEST(TensorListTest, NamesAndShapesAreThoseOfTheRecordedCheckpoints) {
  for (const std::string name : {"kimi_vl_a3b", "moonlight", "kimi_k2_5"}) {
    const absl::StatusOr<ModelFolder> folder = ModelFolder::Open(absl::StrCat(TEST_DATA_DIR, "/fixtures/", name));
    ASSERT_TRUE(folder.ok()) << folder.status();
    std::vector<std::string> names;
    for (const TensorSpec& spec : ListTensors(Recorded(name))) {
      names.push_back(spec.name);
      const absl::StatusOr<const StoredTensor*> stored = folder->Find(spec.name);
      ASSERT_TRUE(stored.ok()) << stored.status();
      EXPECT_EQ((*stored)->shape, spec.shape) << spec.name;
    }
    std::sort(names.begin(), names.end());
    EXPECT_EQ(names, folder->Names());
  }
}

TEST(TensorListTest, PartsCutTheCanonicalListWithoutOverlap) {
  const ModelConfig config = Recorded("kimi_vl_a3b");
  std::vector<std::string> whole;
  for (const TensorSpec& spec : ListTensors(config)) whole.push_back(spec.name);
  std::vector<std::string> parts;
  for (const PartRange& range : {PartRange{0, 0, false, false, true}, PartRange{0, 1, true, false, false}, PartRange{1, 4, false, true, false}}) {
    for (const TensorSpec& spec : ListTensors(config, range)) parts.push_back(spec.name);
  }
  EXPECT_EQ(parts, whole);
}

TEST(TensorListTest, ATiedHeadIsTheEmbeddingAndStandsOnBothWorkers) {
  ModelConfig config = Recorded("moonlight");
  config.text.tie_word_embeddings = true;
  const std::vector<TensorSpec> last = ListTensors(config, {3, 4, false, true, false});
  EXPECT_EQ(last.front().name, "model.embed_tokens.weight");
  EXPECT_EQ(last.back().name, "model.norm.weight");
}

const TensorSpec& Find(const std::vector<TensorSpec>& specs, const std::string& name) {
  return *std::find_if(specs.begin(), specs.end(), [&](const TensorSpec& spec) { return spec.name == name; });
}

TEST(TensorListTest, FreshWeightsFollowTheReferencesRules) {
  const std::vector<TensorSpec> specs = ListTensors(Recorded("kimi_vl_a3b"));
  const std::string layer = "language_model.model.layers.1.";
  const double depth = 0.02 / std::sqrt(2.0 * 2);
  EXPECT_DOUBLE_EQ(Find(specs, layer + "self_attn.q_proj.weight").std, 0.02);
  EXPECT_DOUBLE_EQ(Find(specs, layer + "self_attn.o_proj.weight").std, depth);
  EXPECT_DOUBLE_EQ(Find(specs, layer + "mlp.gate.weight").std, depth);
  EXPECT_DOUBLE_EQ(Find(specs, layer + "mlp.experts.3.gate_proj.weight").std, 0.02);
  EXPECT_DOUBLE_EQ(Find(specs, layer + "mlp.experts.3.up_proj.weight").std, depth);
  EXPECT_DOUBLE_EQ(Find(specs, layer + "mlp.shared_experts.down_proj.weight").std, depth);
  const TensorSpec& bias = Find(specs, layer + "mlp.gate.e_score_correction_bias");
  EXPECT_FALSE(bias.trainable);
  EXPECT_EQ(bias.initializer, Initializer::kZeros);
  EXPECT_EQ(bias.layer, 1);
  const TensorSpec& head = Find(specs, "language_model.lm_head.weight");
  EXPECT_DOUBLE_EQ(head.std, 1.0 / 8);
  EXPECT_DOUBLE_EQ(head.cut, 3.0 / 8);
  EXPECT_EQ(Find(specs, "language_model.model.embed_tokens.weight").initializer, Initializer::kNormal);
  EXPECT_DOUBLE_EQ(Find(specs, "multi_modal_projector.linear_1.weight").std, std::sqrt(2.0 / 256));
  EXPECT_DOUBLE_EQ(Find(specs, "vision_tower.encoder.blocks.0.wqkv.weight").cut, 2.0);
  EXPECT_EQ(Find(specs, "vision_tower.encoder.blocks.0.norm1.weight").initializer, Initializer::kOnes);
  EXPECT_EQ(Find(specs, layer + "mlp.experts.3.up_proj.weight").expert, 3);
}

}  // namespace
}  // namespace moonpipe
