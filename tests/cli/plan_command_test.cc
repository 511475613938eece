#include "cli/plan_command.h"

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/spec/safetensors.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

Json PlanOf(const PlanArguments& arguments) {
  const auto report = MakePlanReport(arguments);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? Json::parse(FormatPlanJson(*report)) : Json();
}

PlanArguments Model(const std::string& model, int64_t stages = 2) {
  PlanArguments arguments;
  arguments.model = model;
  arguments.stages = stages;
  return arguments;
}

std::string Refusal(const PlanArguments& arguments) {
  const auto report = MakePlanReport(arguments);
  EXPECT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInvalidArgument) << report.status();
  return std::string(report.status().message());
}

std::string Fixture(const std::string& name) { return std::string(TEST_DATA_DIR "/fixtures/") + name; }

TEST(PlanCommandTest, PublishedModelsHaveTheirPublishedNumbersOfParameters) {
  EXPECT_EQ(PlanOf(Model("kimi-k2.5"))["parameters"]["total"], 1026879376368);
  EXPECT_EQ(PlanOf(Model("Kimi_K2.7-code"))["parameters"]["total"], 1026879376368);
  EXPECT_EQ(PlanOf(Model("kimi-vl-a3b"))["parameters"]["total"], 16407656048);
  EXPECT_EQ(PlanOf(Model("moonlight-16b-a3b"))["parameters"]["total"], 15960110208);
}

TEST(PlanCommandTest, PartsAndActiveParametersOfK25AreThePublishedOnes) {
  const Json parameters = PlanOf(Model("kimi-k2.5"))["parameters"];
  EXPECT_EQ(parameters["vision"], 416866032);
  EXPECT_EQ(parameters["projector"], 54277888);
  EXPECT_EQ(parameters["decoder"], 1026408232448);
  EXPECT_EQ(parameters["embedding"], 163840LL * 7168);
  EXPECT_NEAR(parameters["active_per_token"].get<double>(), 32.86e9, 0.01e9);
  EXPECT_NEAR(parameters["active_per_token_without_embedding"].get<double>(), 31.69e9, 0.01e9);
}

TEST(PlanCommandTest, CountsOfAFixtureEqualTheElementsOfItsFile) {
  for (const char* name : {"kimi_vl_a3b", "moonlight", "kimi_k2_5"}) {
    auto file = SafetensorsFile::Open(Fixture(name) + "/model.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    int64_t elements = 0;
    for (const StoredTensor& tensor : file->tensors()) {
      int64_t product = 1;
      for (const int64_t size : tensor.shape) product *= size;
      elements += product;
    }
    const Json plan = PlanOf(Model(Fixture(name)));
    EXPECT_EQ(plan["parameters"]["total"], elements) << name;
    // Two stages and an encoder hold every parameter once.
    int64_t held = 0;
    for (const Json& device : plan["devices"]) held += device["parameters"].get<int64_t>();
    EXPECT_EQ(held, elements) << name;
    EXPECT_EQ(PlanOf(Model(Fixture(name) + "/config.json"))["parameters"]["total"], elements);
  }
}

TEST(PlanCommandTest, AModelWithoutATowerPlansNoEncoder) {
  const Json plan = PlanOf(Model("moonlight-16b-a3b", 3));
  ASSERT_EQ(plan["devices"].size(), 3u);
  EXPECT_EQ(plan["devices"][0]["name"], "decoder stage 0");
  EXPECT_EQ(plan["flops_per_step"]["vision"], 0);
  PlanArguments with_pictures = Model("moonlight-16b-a3b");
  with_pictures.pictures = 1;
  EXPECT_THAT(Refusal(with_pictures), HasSubstr("1 pictures for a model without a vision tower"));
}

TEST(PlanCommandTest, TheTypedOverridesAreEchoed) {
  PlanArguments arguments = Model("debug-kimi-vl");
  const Json plain = PlanOf(arguments)["model"];
  EXPECT_EQ(plain["experts"], "grouped");
  EXPECT_EQ(plain["attention"], "fused");
  EXPECT_EQ(plain["norm_rounding"], "before_weight");
  arguments.overrides = {"model.experts=loop", "model.attention=explicit", "model.norm_rounding=after_weight"};
  const auto report = MakePlanReport(arguments);
  ASSERT_TRUE(report.ok()) << report.status();
  const Json model = Json::parse(FormatPlanJson(*report))["model"];
  EXPECT_EQ(model["experts"], "loop");
  EXPECT_EQ(model["attention"], "explicit");
  EXPECT_EQ(model["norm_rounding"], "after_weight");
  EXPECT_THAT(FormatPlanText(*report), HasSubstr("model.experts loop, model.attention explicit, model.norm_rounding after_weight"));
}

TEST(PlanCommandTest, EveryNumberThatDoesNotFitIsRefusedAtOnceWithTheNearestThatDo) {
  PlanArguments arguments = Model("kimi-k2.5", 62);
  arguments.parallel = {.data = 3, .expert = 5, .tensor = 48, .context = 7};
  arguments.microbatches = 32;
  const std::string message = Refusal(arguments);
  EXPECT_THAT(message, HasSubstr("has 5 problems"));
  EXPECT_THAT(message, HasSubstr("expert 5 does not divide n_routed_experts 384; the nearest that fit are 4 and 6"));
  EXPECT_THAT(message, HasSubstr("tensor 48 does not divide num_attention_heads 64; the nearest that fit are 32 and 64"));
  EXPECT_THAT(message, HasSubstr("context 7 does not divide microbatch_tokens 4096; the nearest that fit are 4 and 8"));
  EXPECT_THAT(message, HasSubstr("data 3 x expert 5 = 15 does not divide microbatches 32; the nearest that fit are 8 and 16, or 30 or 45 microbatches"));
  EXPECT_THAT(message, AllOf(HasSubstr("62"), HasSubstr("61 decoder layers"), HasSubstr("1 to 61")));
}

TEST(PlanCommandTest, BadPicturesAndGridsAreRefusedWithTheNearestGoodOnes) {
  PlanArguments arguments = Model("kimi-k2.5");
  arguments.grid = "31x32";
  EXPECT_THAT(Refusal(arguments), HasSubstr("grid has 31 rows, no multiple of the window of 2; the nearest are 30 and 32"));
  arguments.grid = "5x32x32";
  EXPECT_THAT(Refusal(arguments), HasSubstr("5 frames; this tower takes 1 to 4"));
  arguments.grid = "big";
  EXPECT_THAT(Refusal(arguments), HasSubstr("ROWSxCOLUMNS"));
  arguments.grid = "32x32";
  arguments.pictures = 20;
  EXPECT_THAT(Refusal(arguments), HasSubstr("take 5120 of a microbatch's 4096 tokens; at most 16 fit"));
}

TEST(PlanCommandTest, UnknownNamesGetTheNearestOnes) {
  EXPECT_THAT(Refusal(Model("kimi-k2.55")), HasSubstr("kimi-k2.5"));
  PlanArguments arguments = Model("kimi-k2.5");
  arguments.schedule = "1f1bb";
  EXPECT_THAT(Refusal(arguments), HasSubstr("1f1b"));
  arguments.schedule.reset();
  arguments.overrides = {"pipeline.stagse=2"};
  EXPECT_THAT(Refusal(arguments), HasSubstr("did you mean stages"));
}

TEST(PlanCommandTest, NothingOrTwoModelsAreRefused) {
  EXPECT_THAT(Refusal(PlanArguments()), HasSubstr("one of the two"));
  PlanArguments both = Model("kimi-k2.5");
  both.run_file = "run.yaml";
  EXPECT_THAT(Refusal(both), HasSubstr("one of the two"));
}

TEST(PlanCommandTest, ParallelSizesDivideWhatTheyShareAndNothingElse) {
  const Json one = PlanOf(Model("kimi-k2.5", 4));
  PlanArguments arguments = Model("kimi-k2.5", 4);
  arguments.parallel = {.data = 2, .expert = 8, .tensor = 4, .context = 2};
  const Json shared = PlanOf(arguments);
  EXPECT_EQ(shared["parallel"]["devices"], 4 * 2 * 8 * 4 * 2 + 2 * 8);
  EXPECT_EQ(shared["estimate"]["run_accepts"], false);
  EXPECT_EQ(shared["estimate"]["why_not"].size(), 4u);
  EXPECT_EQ(one["estimate"]["run_accepts"], true);
  for (size_t i = 0; i < one["devices"].size(); ++i) {
    const Json& before = one["devices"][i];
    const Json& after = shared["devices"][i];
    if (i == 0) {
      EXPECT_EQ(after["parameters"], before["parameters"]);  // the encoder is whole in every replica
      continue;
    }
    EXPECT_LT(after["parameters"].get<int64_t>() * 16, before["parameters"].get<int64_t>());
    EXPECT_GT(after["parameters"].get<int64_t>() * 8 * 4, before["parameters"].get<int64_t>());
    EXPECT_LT(after["memory_bytes"]["activations"], before["memory_bytes"]["activations"]);
  }
  // The same step over more devices: sixteen times the microbatches, sixteen times the work.
  EXPECT_EQ(shared["step"]["microbatches"], 64);
  EXPECT_EQ(shared["flops_per_step"]["total"].get<uint64_t>(), 16 * one["flops_per_step"]["total"].get<uint64_t>());
}

TEST(PlanCommandTest, SharesOfTheDevicesAddUpToTheStep) {
  for (const char* model : {"kimi-k2.5", "kimi-vl-a3b", "moonlight-16b-a3b"}) {
    const Json plan = PlanOf(Model(model, 5));
    uint64_t sum = 0;
    for (const Json& device : plan["devices"]) sum += device["flops_per_step"]["total"].get<uint64_t>();
    EXPECT_EQ(sum, plan["flops_per_step"]["total"].get<uint64_t>()) << model;
    int64_t layers = 0;
    for (const Json& count : plan["layers_per_stage"]) layers += count.get<int64_t>();
    EXPECT_EQ(layers, plan["model"]["layers"]);
  }
}

TEST(PlanCommandTest, MoreMicrobatchesWaitAtTheFirstStageThanAtTheLast) {
  PlanArguments arguments = Model("moonlight-16b-a3b", 3);
  arguments.microbatches = 8;
  const Json plan = PlanOf(arguments);
  EXPECT_EQ(plan["devices"][0]["live_microbatches"], 3);
  EXPECT_EQ(plan["devices"][2]["live_microbatches"], 1);
  arguments.schedule = "gpipe";
  const Json gpipe = PlanOf(arguments);
  for (const Json& device : gpipe["devices"]) EXPECT_EQ(device["live_microbatches"], 8);
}

TEST(PlanCommandTest, AFrozenTowerCountsAThirdAndHoldsNoMoments) {
  const Json trained = PlanOf(Model("debug-kimi-vl"));
  PlanArguments arguments = Model("debug-kimi-vl");
  arguments.overrides = {"optimizer.groups=[{match: vision, frozen: true}]"};
  const Json frozen = PlanOf(arguments);
  EXPECT_EQ(3 * frozen["flops_per_step"]["vision"].get<int64_t>(), trained["flops_per_step"]["vision"].get<int64_t>());
  EXPECT_EQ(frozen["flops_per_step"]["decoder"], trained["flops_per_step"]["decoder"]);
  // The projector beside the tower still moves.
  const int64_t projector = trained["parameters"]["projector"];
  EXPECT_EQ(frozen["devices"][0]["memory_bytes"]["optimizer"], 8 * projector);
  EXPECT_EQ(frozen["devices"][0]["memory_bytes"]["weights"], trained["devices"][0]["memory_bytes"]["weights"]);
}

TEST(PlanCommandTest, APeakIsKnownOrUnknownAndNeverGuessed) {
  PlanArguments arguments = Model("kimi-vl-a3b");
  EXPECT_EQ(PlanOf(arguments)["device_peak_flops_per_second"], "unknown");
  arguments.device = "Quantum 9000";
  EXPECT_EQ(PlanOf(arguments)["device_peak_flops_per_second"], "unknown");
  arguments.device = "NVIDIA H200";
  const Json plan = PlanOf(arguments);
  EXPECT_EQ(plan["device_peak_flops_per_second"], 989e12);
  EXPECT_DOUBLE_EQ(plan["seconds_per_step_at_peak"], plan["flops_per_step"]["total"].get<double>() / (3 * 989e12));
}

TEST(PlanCommandTest, ARunFileIsPlannedWithItsOwnNumbers) {
  PlanArguments arguments;
  arguments.run_file = SOURCE_DIR "/examples/digits/run.yaml";
  const auto report = MakePlanReport(arguments);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->parts.size(), report->spec.pipeline().stages());
  EXPECT_EQ(report->manifest.microbatches_size(), static_cast<int>(report->spec.pipeline().microbatches()));
  const std::string text = FormatPlanText(*report);
  EXPECT_THAT(text, AllOf(HasSubstr("parameters"), HasSubstr("decoder stage 1"), Not(HasSubstr("An estimate by formula"))));
}

TEST(PlanCommandTest, AStepsManifestIsCountedAsItIs) {
  const std::string path = testing::TempDir() + "/step.json";
  std::ofstream(path) << R"({"microbatches": [{"index": 0, "tokens": 64, "document_lengths": [40, 24]},
    {"index": 1, "tokens": 30, "document_lengths": [30], "grids": [{"frames": 1, "rows": 4, "columns": 4}], "feature_rows": 4}]})";
  PlanArguments arguments = Model(Fixture("kimi_vl_a3b"));
  arguments.manifest = path;
  const Json plan = PlanOf(arguments);
  EXPECT_EQ(plan["step"]["tokens"], 94);
  EXPECT_EQ(plan["step"]["patches"], 16);
  std::ofstream(path) << R"({"microbatches": [{"tokens": 30, "document_lengths": [31], "grids": [{"frames": 1, "rows": 4, "columns": 4}], "feature_rows": 5}]})";
  EXPECT_THAT(Refusal(arguments), AllOf(HasSubstr("documents of 31 tokens, but it has 30"), HasSubstr("give 4 feature rows, feature_rows is 5")));
}

}  // namespace
}  // namespace moonpipe
