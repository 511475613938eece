#include "moonpipe/data/preprocessor_config.h"

#include <fstream>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/data/testing_files.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

json KimiVl() {
  return {{"patch_size", 14}, {"merge_kernel_size", {2, 2}}, {"in_token_limit", 4096}, {"num_pooled_tokens", 1024},
          {"pad_input", true}, {"image_mean", {0.5, 0.5, 0.5}}, {"image_std", {0.5, 0.5, 0.5}}};
}

json K25() {
  return json::parse(R"({"media_proc_cfg": {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 16384,
    "patch_limit_on_one_side": 512, "in_patch_limit_each_frame": 4096, "in_patch_limit_video": null, "sample_fps": 2.0,
    "max_num_frames_each_video": null, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff", "fixed_output_tokens": null,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}})");
}

ModelConfig Model() { return ParseModelConfig(TinyConfig().dump()).value(); }

void WriteJson(const std::string& folder, const json& content) { std::ofstream(folder + "/preprocessor_config.json") << content.dump(); }

TEST(ParsePreprocessorConfig, ReadsKimiVl) {
  const auto rule = ParsePreprocessorConfig(KimiVl().dump(), Architecture::kKimiVl);
  ASSERT_TRUE(rule.ok()) << rule.status();
  EXPECT_EQ(rule->size_rule, SizeRule::kInTokenLimit);
  EXPECT_EQ(rule->max_patches, 4096);
  EXPECT_EQ(rule->merge, 2);
  EXPECT_TRUE(rule->pad);
  EXPECT_FALSE(rule->clips.has_value());
  EXPECT_FALSE(rule->background.has_value());
}

TEST(ParsePreprocessorConfig, ReadsK25) {
  const auto rule = ParsePreprocessorConfig(K25().dump(), Architecture::kKimiK25);
  ASSERT_TRUE(rule.ok()) << rule.status();
  EXPECT_EQ(rule->size_rule, SizeRule::kPatchLimits);
  EXPECT_EQ(rule->max_patches, 16384);
  EXPECT_EQ(rule->max_side_patches, 512);
  EXPECT_FALSE(rule->fixed_positions.has_value());
  ASSERT_TRUE(rule->clips.has_value());
  EXPECT_EQ(rule->clips->frames_per_clip, 4);
  EXPECT_EQ(rule->clips->max_patches_each_frame, 4096);
  EXPECT_FALSE(rule->clips->max_patches_video.has_value());
  EXPECT_EQ(rule->clips->sample_fps, 2.0);
}

TEST(ParsePreprocessorConfig, ReadsABackground) {
  json content = K25();
  content["media_proc_cfg"]["transparent_bg_config"] = {{"pattern", "chessboard"}, {"chessboard_square_size", 8}};
  const auto rule = ParsePreprocessorConfig(content.dump(), Architecture::kKimiK25);
  ASSERT_TRUE(rule.ok()) << rule.status();
  ASSERT_TRUE(rule->background.has_value());
  EXPECT_EQ(rule->background->pattern, PictureBackground::Pattern::kChessboard);
  EXPECT_EQ(rule->background->square_size, 8);
  EXPECT_EQ(rule->background->grey_value, 200);
}

TEST(ParsePreprocessorConfig, NamesEveryProblemByItsPath) {
  for (const char* name : {"patch_size", "merge_kernel_size", "in_token_limit", "image_mean", "image_std"}) {
    json content = KimiVl();
    content.erase(name);
    EXPECT_THAT(ParsePreprocessorConfig(content.dump(), Architecture::kKimiVl).status().message(),
                HasSubstr(std::string("  ") + name + ": is missing; it has no default"));
  }
  for (const char* name : {"patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side", "in_patch_limit_each_frame",
                           "sample_fps", "temporal_merge_kernel_size", "image_mean", "image_std"}) {
    json content = K25();
    content["media_proc_cfg"][name] = nullptr;
    EXPECT_THAT(ParsePreprocessorConfig(content.dump(), Architecture::kKimiK25).status().message(),
                HasSubstr(std::string("media_proc_cfg.") + name + ": is missing"));
  }
  json content = KimiVl();
  content["in_token_limit"] = 4096.5;
  content["merge_kernel_size"] = {2, 1};
  content["image_mean"] = {0.48, 0.46, 0.41};
  content["transparent_bg_config"] = {{"pattern", "pink"}};
  EXPECT_THAT(ParsePreprocessorConfig(content.dump(), Architecture::kKimiVl).status().message(),
              AllOf(HasSubstr("4 problems"), HasSubstr("in_token_limit: must be a whole number"), HasSubstr("merge_kernel_size: must be one"),
                    HasSubstr("image_mean: [0.48,0.46,0.41] is not supported"), HasSubstr("transparent_bg_config.pattern: must be white")));
  EXPECT_THAT(ParsePreprocessorConfig(KimiVl().dump(), Architecture::kKimiK25).status().message(), HasSubstr("media_proc_cfg: must be"));
  EXPECT_FALSE(ParsePreprocessorConfig("{", Architecture::kKimiVl).ok());
}

TEST(ResolvePictureRule, TakesTheFirstFolderWithAFileAndThenTheRunsLimit) {
  const std::string empty = MakeFolder("rule-empty"), first = MakeFolder("rule-first"), second = MakeFolder("rule-second");
  json content = KimiVl();
  content["in_token_limit"] = 100;
  WriteJson(first, content);
  WriteJson(second, KimiVl());
  EXPECT_EQ(ResolvePictureRule(Model(), {empty, first, second}, std::nullopt)->max_patches, 100);
  EXPECT_EQ(ResolvePictureRule(Model(), {second, first}, std::nullopt)->max_patches, 4096);
  EXPECT_EQ(ResolvePictureRule(Model(), {first}, 7)->max_patches, 7);
  EXPECT_EQ(ResolvePictureRule(Model(), {empty}, 9)->max_patches, 9);
}

TEST(ResolvePictureRule, HasNoBudgetOfItsOwn) {
  const std::string empty = MakeFolder("rule-empty");
  EXPECT_THAT(ResolvePictureRule(Model(), {empty}, std::nullopt).status().message(),
              AllOf(HasSubstr("preprocessor_config.json"), HasSubstr("data.max_patches"), HasSubstr(empty)));
  ModelConfig text = Model();
  text.vision.reset();
  EXPECT_TRUE(ResolvePictureRule(text, {empty}, std::nullopt).ok());
}

TEST(ResolvePictureRule, MustAgreeWithTheModel) {
  const std::string folder = MakeFolder("rule-disagrees");
  json content = KimiVl();
  content["patch_size"] = 16;
  WriteJson(folder, content);
  EXPECT_THAT(ResolvePictureRule(Model(), {folder}, std::nullopt).status().message(),
              AllOf(HasSubstr(folder), HasSubstr("patch_size is 16"), HasSubstr("vision_config.patch_size is 14")));
  ModelConfig clips = Model();
  clips.architecture = Architecture::kKimiK25;
  clips.vision->init_pos_emb_time = 2;
  WriteJson(folder, K25());
  EXPECT_THAT(ResolvePictureRule(clips, {folder}, std::nullopt).status().message(),
              AllOf(HasSubstr("temporal_merge_kernel_size is 4"), HasSubstr("init_pos_emb_time is 2")));
  clips.vision->init_pos_emb_time = 4;
  EXPECT_TRUE(ResolvePictureRule(clips, {folder}, std::nullopt).ok());
}

TEST(ResolvePictureRule, CutsAsTheModelsPatchOrderSays) {
  json config = TinyConfig();
  config["vision_config"]["patch_order"] = "block";
  const auto model = ParseModelConfig(config.dump());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(ResolvePictureRule(*model, {}, 16)->patch_order, PatchOrder::kBlock);
  EXPECT_EQ(ResolvePictureRule(Model(), {}, 16)->patch_order, PatchOrder::kRaster);
}

TEST(PatchOrderOfAConfig, ContradictsRotaryPositionsOfSeveralAxes) {
  json config = TinyConfig();
  config["vision_config"]["patch_order"] = "spiral";
  EXPECT_THAT(ParseModelConfig(config.dump()).status().message(), HasSubstr("vision_config.patch_order: must be raster or block, is \"spiral\""));
  config = TinyConfig();
  config["text_config"]["rope_scaling"] = {{"type", "default"}, {"mrope_section", {16, 24, 24}}};
  EXPECT_THAT(ParseModelConfig(config.dump()).status().message(),
              AllOf(HasSubstr("text_config.rope_scaling.mrope_section"), HasSubstr("vision_config.patch_order \"raster\"")));
  config["vision_config"]["patch_order"] = "block";
  EXPECT_THAT(ParseModelConfig(config.dump()).status().message(), HasSubstr("mrope_section: [16,24,24] is not supported"));
}

}  // namespace
}  // namespace moonpipe
