#include "moonpipe/spec/model_config.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

Json Recorded(const std::string& name) {
  return Json::parse(*ReadFile(absl::StrCat(TEST_DATA_DIR, "/fixtures/", name, "/config.json")));
}

std::string ErrorOf(const Json& json) {
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(json.dump());
  if (config.ok()) return "no error";
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(config.status().message());
}

TEST(ModelConfigTest, AKimiVlFileIsReadInWhole) {
  const std::string text = *ReadFile(std::string(TEST_DATA_DIR) + "/fixtures/kimi_vl_a3b/config.json");
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->architecture, Architecture::kKimiVl);
  EXPECT_EQ(config->json, text);
  EXPECT_EQ(config->media_placeholder_token_id, 5);
  EXPECT_EQ(config->eos_token_id, 2);
  EXPECT_EQ(config->text.qk_head_dim(), 40);
  EXPECT_EQ(config->text.rope_theta, 800000);
  EXPECT_FALSE(config->text.q_lora_rank.has_value());
  EXPECT_FALSE(config->text.rope_scaling.has_value());
  EXPECT_FALSE(config->text.IsMoeLayer(0));
  EXPECT_TRUE(config->text.IsMoeLayer(1));
  ASSERT_TRUE(config->vision.has_value());
  EXPECT_EQ(config->vision->merged_size(), 256);
  EXPECT_EQ(config->vision->init_pos_emb_time, 1);
}

TEST(ModelConfigTest, TheLabelOfUntrainedTokensIsTheFilesOwn) {
  Json json = Recorded("kimi_vl_a3b");
  json["ignore_index"] = -1;
  EXPECT_EQ(ParseModelConfig(json.dump())->ignore_index, -1);
  json.erase("ignore_index");
  EXPECT_EQ(ParseModelConfig(json.dump())->ignore_index, -100);
  json["ignore_index"] = "none";
  EXPECT_THAT(ErrorOf(json), HasSubstr("ignore_index"));
}

TEST(ModelConfigTest, AMoonlightFileHasNoVision) {
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(Recorded("moonlight").dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->architecture, Architecture::kDeepseekV3);
  EXPECT_FALSE(config->vision.has_value());
  EXPECT_EQ(config->media_placeholder_token_id, -1);
}

TEST(ModelConfigTest, AK25FileHasClipsAndYarn) {
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(Recorded("kimi_k2_5").dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->vision->init_pos_emb_time, 4);
  EXPECT_EQ(config->text.q_lora_rank, 48);
  ASSERT_TRUE(config->text.rope_scaling.has_value());
  EXPECT_EQ(config->text.rope_scaling->factor, 64);
}

TEST(ModelConfigTest, AllProblemsAreListedAtOnceByTheirPaths) {
  Json json = Recorded("kimi_vl_a3b");
  json["text_config"].erase("hidden_size");
  json["text_config"]["vocab_size"] = "512";
  json["text_config"]["rms_norm_eps"] = 0;
  json["vision_config"]["patch_size"] = nullptr;
  EXPECT_THAT(ErrorOf(json), AllOf(HasSubstr("text_config.hidden_size: is missing"), HasSubstr("text_config.vocab_size: must be a whole number, is \"512\""),
                                   HasSubstr("text_config.rms_norm_eps: must be a number above 0"), HasSubstr("vision_config.patch_size: is missing")));
}

TEST(ModelConfigTest, UnsupportedOptionsAreRefusedWithTheReason) {
  const std::pair<const char*, Json> options[] = {{"scoring_func", "softmax"}, {"hidden_act", "gelu"},          {"attention_bias", true},
                                                  {"topk_method", "greedy"},   {"num_key_value_heads", 2},      {"num_nextn_predict_layers", 1},
                                                  {"attention_dropout", 0.1}};
  for (const auto& [name, value] : options) {
    Json json = Recorded("kimi_vl_a3b");
    json["text_config"][name] = value;
    EXPECT_THAT(ErrorOf(json), AllOf(HasSubstr(absl::StrCat("text_config.", name, ": ")), HasSubstr("not supported"))) << name;
  }
  Json quantised = Recorded("kimi_vl_a3b");
  quantised["text_config"]["quantization_config"] = {{"quant_method", "gptq"}, {"bits", 4}};
  EXPECT_THAT(ErrorOf(quantised), HasSubstr("text_config.quantization_config.quant_method: \"gptq\" is not supported"));
  Json json = Recorded("moonlight");
  json["scoring_func"] = "softmax";
  EXPECT_THAT(ErrorOf(json), HasSubstr("scoring_func: \"softmax\" is not supported: experts are scored by sigmoids"));
}

TEST(ModelConfigTest, RopeScalingIsNoneUnlessTheFileAsksForYarn) {
  Json json = Recorded("moonlight");
  json["rope_scaling"] = nullptr;
  EXPECT_FALSE(ParseModelConfig(json.dump())->text.rope_scaling.has_value());
  json.erase("rope_scaling");
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 50000.0}};
  json.erase("rope_theta");
  const absl::StatusOr<ModelConfig> newer = ParseModelConfig(json.dump());
  ASSERT_TRUE(newer.ok()) << newer.status();
  EXPECT_FALSE(newer->text.rope_scaling.has_value());
  EXPECT_EQ(newer->text.rope_theta, 50000);
  json["rope_parameters"]["rope_type"] = "linear";
  EXPECT_THAT(ErrorOf(json), HasSubstr("rope_parameters.rope_type: \"linear\" is not supported"));
}

TEST(ModelConfigTest, TheMergeKernelIsExactlyTwoNumbers) {
  for (const Json& merge : {Json(2), Json::array(), Json({2}), Json({2, 2, 2}), Json({2, 0}), Json({2, "2"})}) {
    Json json = Recorded("kimi_vl_a3b");
    json["vision_config"]["merge_kernel_size"] = merge;
    EXPECT_THAT(ErrorOf(json), HasSubstr("vision_config.merge_kernel_size: must be exactly two whole numbers")) << merge;
  }
}

TEST(ModelConfigTest, WhatATowerNeedsHasNoDefault) {
  for (const char* model : {"kimi_vl_a3b", "kimi_k2_5"}) {
    for (const char* field : {"merge_kernel_size", "patch_size"}) {
      Json json = Recorded(model);
      json["vision_config"].erase(field);
      EXPECT_THAT(ErrorOf(json), HasSubstr(absl::StrCat("vision_config.", field, ": is missing; it has no default")));
      json["vision_config"][field] = nullptr;
      EXPECT_THAT(ErrorOf(json), HasSubstr(absl::StrCat("vision_config.", field, ": is missing; it has no default")));
    }
  }
}

TEST(ModelConfigTest, DeepstackFeaturesAreRefusedWhereverTheyStand) {
  Json json = Recorded("kimi_vl_a3b");
  json["vision_config"]["deepstack_visual_indexes"] = {8, 16, 24};
  json["text_config"]["use_deepstack"] = false;
  json["deepstack_layers"] = Json::array();
  EXPECT_THAT(ErrorOf(json), AllOf(HasSubstr("3 problems"), HasSubstr("vision_config.deepstack_visual_indexes: is not supported"),
                                   HasSubstr("text_config.use_deepstack: "), HasSubstr("\n  deepstack_layers: ")));
}

TEST(ModelConfigTest, TheTopLevelArchitecturePicksTheModelAndBothSpellingsOfTheDecoderAreRead) {
  Json json = Recorded("moonlight");
  json["model_type"] = "kimi_k2";
  EXPECT_EQ(ParseModelConfig(json.dump())->architecture, Architecture::kDeepseekV3);
  json.erase("architectures");
  EXPECT_EQ(ParseModelConfig(json.dump())->architecture, Architecture::kDeepseekV3);
  json = Recorded("kimi_k2_5");
  for (const char* spelling : {"kimi_k2", "deepseek_v3"}) {
    json["text_config"]["model_type"] = spelling;
    EXPECT_EQ(ParseModelConfig(json.dump())->architecture, Architecture::kKimiK25);
  }
}

TEST(ModelConfigTest, QuantisationIsReadAtTheTopOrInTheDecoder) {
  const Json packed = Json::parse(R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
    "targets": ["Linear"], "input_activations": null,
    "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32}}}})");
  for (const bool top : {false, true}) {
    Json json = Recorded("kimi_k2_5");
    (top ? json : json["text_config"])["quantization_config"] = packed;
    const absl::StatusOr<ModelConfig> config = ParseModelConfig(json.dump());
    ASSERT_TRUE(config.ok()) << config.status();
    ASSERT_TRUE(config->quantization.has_value());
    EXPECT_EQ(config->quantization->method, QuantizationMethod::kInt4);
    EXPECT_EQ(config->quantization->group_size, 32);
    EXPECT_EQ(Json::parse(WithoutQuantization(config->json)), Recorded("kimi_k2_5"));
  }
  Json json = Recorded("moonlight");
  EXPECT_EQ(WithoutQuantization(json.dump()), json.dump());
  json["quantization_config"] = {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {128, 64}}};
  EXPECT_EQ(ParseModelConfig(json.dump())->quantization->block_columns, 64);
  json["quantization_config"]["weight_block_size"] = {128};
  EXPECT_THAT(ErrorOf(json), HasSubstr("quantization_config.weight_block_size: must be two whole numbers above 0, is [128]"));
  json["quantization_config"] = packed;
  json["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8;
  json["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = false;
  EXPECT_THAT(ErrorOf(json), AllOf(HasSubstr("quantization_config.config_groups.group_0.weights.num_bits: only 4 bits"),
                                   HasSubstr("quantization_config.config_groups.group_0.weights.symmetric: false is not supported")));
}

// The names of the configuration classes of transformers 5; what they have no field for is what the class always does.
TEST(ModelConfigTest, AFileThatTransformersFiveWroteIsReadAsTheModelItIs) {
  const ModelConfig published = *ParseModelConfig(Recorded("kimi_k2_5").dump());
  Json json = Recorded("kimi_k2_5");
  Json& text = json["text_config"];
  Json& vision = json["vision_config"];
  json["image_token_id"] = json["media_placeholder_token_id"];
  json.erase("media_placeholder_token_id");
  json["tie_word_embeddings"] = true;
  json["projection_layer_norm_eps"] = 1e-5;
  text["model_type"] = "deepseek_v3";
  for (const char* field : {"scoring_func", "topk_method", "moe_layer_freq"}) text.erase(field);
  text["rope_parameters"] = text["rope_scaling"];
  text.erase("rope_scaling");
  text.erase("rope_theta");
  Json native = {{"model_type", "kimi_k25_vision"}, {"patch_size", vision["patch_size"]}, {"merge_kernel_size", vision["merge_kernel_size"]}};
  for (const char* field : {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"}) {
    native[field] = vision[absl::StrCat("vt_", field)];
  }
  for (const char* side : {"height", "width", "time"}) native[absl::StrCat("pos_emb_", side)] = vision[absl::StrCat("init_pos_emb_", side)];
  vision = native;
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(json.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->media_placeholder_token_id, published.media_placeholder_token_id);
  EXPECT_FALSE(config->text.tie_word_embeddings);
  EXPECT_EQ(config->text.rope_scaling->factor, published.text.rope_scaling->factor);
  EXPECT_EQ(config->text.rope_theta, published.text.rope_theta);
  EXPECT_EQ(config->vision->hidden_size, published.vision->hidden_size);
  EXPECT_EQ(config->vision->num_attention_heads, published.vision->num_attention_heads);
  EXPECT_EQ(config->vision->init_pos_emb_time, published.vision->init_pos_emb_time);
  EXPECT_EQ(config->vision->init_pos_emb_height, published.vision->init_pos_emb_height);
}

TEST(ModelConfigTest, SizesThatContradictEachOtherAreRefused) {
  Json json = Recorded("moonlight");
  json["num_experts_per_tok"] = 9;
  EXPECT_THAT(ErrorOf(json), HasSubstr("num_experts_per_tok: 9 exceeds n_routed_experts 8"));
  json = Recorded("moonlight");
  json["n_group"] = 3;
  EXPECT_THAT(ErrorOf(json), HasSubstr("n_group: 3 does not divide n_routed_experts 8"));
  json = Recorded("kimi_vl_a3b");
  json["media_placeholder_token_id"] = 512;
  EXPECT_THAT(ErrorOf(json), HasSubstr("media_placeholder_token_id: must be a token id below vocab_size 512, is 512"));
  json = Recorded("kimi_vl_a3b");
  json["tie_word_embeddings"] = true;
  EXPECT_THAT(ErrorOf(json), HasSubstr("contradicts text_config.tie_word_embeddings"));
}

TEST(ModelConfigTest, CommentsAndSyntaxErrorsCarryLineAndColumn) {
  EXPECT_THAT(std::string(ParseModelConfig("{\n  // sizes\n  \"a\": 1}").status().message()),
              HasSubstr("line 2, column 3: comments are not part of JSON"));
  EXPECT_THAT(std::string(ParseModelConfig("{\"a\": 1, /* x */ \"b\": 2}").status().message()), HasSubstr("line 1, column 10: comments"));
  EXPECT_THAT(std::string(ParseModelConfig("{\"a\": 1,\n \"b\": }").status().message()), AllOf(HasSubstr("line 2, column 7"), Not(HasSubstr("comments"))));
  EXPECT_THAT(std::string(ParseModelConfig("[]").status().message()), HasSubstr("one JSON object"));
  EXPECT_FALSE(ParseModelConfig("").ok());
}

TEST(ModelConfigTest, OtherModelsAreRefusedByName) {
  Json json = Recorded("moonlight");
  json["architectures"] = {"LlamaForCausalLM"};
  EXPECT_THAT(ErrorOf(json), HasSubstr("LlamaForCausalLM"));
  EXPECT_THAT(std::string(ReadModelConfig("/nonexistent/config.json").status().message()), HasSubstr("/nonexistent/config.json"));
}

}  // namespace
}  // namespace moonpipe
