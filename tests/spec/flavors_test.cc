#include "moonpipe/spec/flavors.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ModelConfig Config(const std::string& name) {
  cluster::v1::ModelSpec model;
  model.set_flavor(name);
  const absl::StatusOr<ModelConfig> config = ReadModelOf(model);
  EXPECT_TRUE(config.ok()) << name << ": " << config.status();
  return config.ok() ? *config : ModelConfig();
}

TEST(FlavorsTest, EveryFlavorIsAConfigurationThatTheParserTakes) {
  for (const Flavor& flavor : Flavors()) {
    const ModelConfig config = Config(flavor.name);
    EXPECT_EQ(config.json, flavor.config_json);
    EXPECT_GT(CountParameters(config).total(), 0);
  }
}

TEST(FlavorsTest, PublishedFlavorsHaveThePublishedTotals) {
  EXPECT_EQ(CountParameters(Config("kimi-vl-a3b")).total(), 16'407'656'048);
  EXPECT_EQ(CountParameters(Config("moonlight-16b-a3b")).total(), 15'960'110'208);
  EXPECT_EQ(CountParameters(Config("kimi-k2.5")).total(), 1'026'879'376'368);
}

// What the totals do not show.
TEST(FlavorsTest, PublishedFlavorsHaveThePublishedConstants) {
  const ModelConfig kimi_vl = Config("kimi-vl-a3b");
  EXPECT_EQ(kimi_vl.text.rope_theta, 800000);
  EXPECT_EQ(kimi_vl.text.num_experts_per_tok, 6);
  EXPECT_EQ(kimi_vl.media_placeholder_token_id, 163605);
  EXPECT_EQ(kimi_vl.pad_token_id, 163839);
  EXPECT_FALSE(kimi_vl.text.rope_scaling.has_value());
  EXPECT_EQ(kimi_vl.vision->init_pos_emb_time, 1);
  const ModelConfig moonlight = Config("moonlight-16b-a3b");
  EXPECT_EQ(moonlight.text.rope_theta, 50000);
  EXPECT_EQ(moonlight.text.max_position_embeddings, 8192);
  EXPECT_FALSE(moonlight.vision.has_value());
  const ModelConfig k25 = Config("kimi-k2.5");
  EXPECT_EQ(k25.text.rms_norm_eps, 1e-5);
  EXPECT_EQ(k25.text.routed_scaling_factor, 2.827);
  EXPECT_EQ(k25.text.num_experts_per_tok, 8);
  ASSERT_TRUE(k25.text.rope_scaling.has_value());
  EXPECT_EQ(k25.text.rope_scaling->factor, 64);
  EXPECT_EQ(k25.text.rope_scaling->beta_fast, 32);
  EXPECT_EQ(k25.text.rope_scaling->original_max_position_embeddings, 4096);
  EXPECT_EQ(k25.vision->init_pos_emb_time, 4);
}

TEST(FlavorsTest, NamesMatchWithoutRegardToCaseAndPunctuation) {
  for (const char* name : {"Kimi_K2.5", "kimi-k2-5", "KIMIK25", "kimi-k2.6", "Kimi-K2.7", "kimi.k2.7.code"}) {
    const absl::StatusOr<const Flavor*> flavor = FindFlavor(name);
    ASSERT_TRUE(flavor.ok()) << flavor.status();
    EXPECT_EQ((*flavor)->name, "kimi-k2.5") << name;
  }
  EXPECT_EQ((*FindFlavor("Kimi-VL-A3B"))->name, "kimi-vl-a3b");
  EXPECT_EQ((*FindFlavor("Moonlight_16B_A3B"))->name, "moonlight-16b-a3b");
}

TEST(FlavorsTest, UnknownNamesListTheNearOnes) {
  EXPECT_THAT(std::string(FindFlavor("Kimi-K3.5").status().message()), AllOf(HasSubstr("\"Kimi-K3.5\""), HasSubstr("did you mean kimi-k2.5 or ")));
  EXPECT_THAT(std::string(FindFlavor("x").status().message()), AllOf(HasSubstr("known are kimi-vl-a3b"), HasSubstr("kimi-k2.7-code")));
  EXPECT_EQ(FindFlavor("").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moonpipe
