// How a run is laid out over processes must not show in its numbers: equal seeds give equal bits, and every step completes, whatever
// pictures are in it.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/data/step_source.h"
#include "moonpipe/spec/safetensors.h"
#include "tests/data/testing_files.h"
#include "tests/integration/tiny.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

using Tensors = std::map<std::string, std::string>;

std::vector<std::string> Differing(const Tensors& a, const Tensors& b) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second != bytes) names.push_back(name);
  }
  for (const auto& [name, bytes] : b) {
    if (!a.contains(name)) names.push_back(name);
  }
  return names;
}

// Of every step what no layout may change, each number with all its digits.
std::vector<std::string> Numbers(const TrainResult& run) {
  std::vector<std::string> lines;
  for (const nlohmann::json& line : run.metrics) {
    std::string text;
    for (const char* field : {"step", "loss", "grad_norm", "learning_rate", "tokens", "trained_labels", "images", "samples", "model_flops"}) {
      absl::StrAppend(&text, field, "=", line.at(field).dump(), " ");
    }
    lines.push_back(text);
  }
  return lines;
}

Tensors Select(const Tensors& tensors, const std::vector<std::string>& prefixes) {
  Tensors selected;
  for (const auto& [name, bytes] : tensors) {
    for (const std::string& prefix : prefixes) {
      if (absl::StartsWith(name, prefix)) selected.emplace(name, bytes);
    }
  }
  return selected;
}
const std::vector<std::string> kVisionParts = {"vision_tower.", "multi_modal_projector."};

Tensors Weights(const TrainResult& run) { return ReadTensors(NewestCheckpoint(run.run_folder), "model"); }
Tensors Moments(const TrainResult& run) { return ReadTensors(NewestCheckpoint(run.run_folder), "optimizer"); }

void ExpectEqualRuns(const TrainResult& a, const TrainResult& b) {
  ASSERT_EQ(a.exit_code, 0) << a.err;
  ASSERT_EQ(b.exit_code, 0) << b.err;
  ASSERT_FALSE(a.metrics.empty());
  EXPECT_EQ(Numbers(a), Numbers(b));
  const Tensors weights = Weights(a);
  // Four layers of a Kimi-VL have more than a hundred tensors; with less the comparison would say nothing.
  ASSERT_GT(weights.size(), 100U);
  EXPECT_THAT(Differing(weights, Weights(b)), IsEmpty());
  const Tensors moments = Moments(a);
  // AdamW keeps two moments of what it trains, Muon one.
  ASSERT_GT(moments.size(), weights.size() * 9 / 10);
  EXPECT_THAT(Differing(moments, Moments(b)), IsEmpty());
}

// One run on two stages with an encoder of its own, which most of the others are compared with.
const TinyRun& Digits() {
  static const TinyRun run = WriteTinyRun("digits", TinyConfig());
  return run;
}
const TrainResult& TwoStages() {
  static const TrainResult result = RunTrain(Digits(), "two-stages", {});
  return result;
}

TEST(IdentityTest, TheLossFallsAndEveryStepHasPictures) {
  ASSERT_EQ(TwoStages().exit_code, 0) << TwoStages().err;
  ASSERT_THAT(TwoStages().metrics, SizeIs(6));
  EXPECT_LT(TwoStages().metrics.back()["loss"], 0.95 * TwoStages().metrics.front()["loss"].get<double>());
  for (const auto& step : TwoStages().metrics) EXPECT_GT(step["images"], 0);
}

TEST(IdentityTest, ARunThatIsRepeatedGivesEqualBytes) { ExpectEqualRuns(TwoStages(), RunTrain(Digits(), "again", {})); }

TEST(IdentityTest, AnotherSeedGivesOtherBytes) {
  // What the comparisons above and below are worth.
  const TrainResult other = RunTrain(Digits(), "seed", {"train.seed=8"});
  ASSERT_EQ(other.exit_code, 0) << other.err;
  EXPECT_NE(Numbers(TwoStages()), Numbers(other));
  EXPECT_GT(Differing(Weights(TwoStages()), Weights(other)).size(), 100U);
}

TEST(IdentityTest, EveryRandomMoveOfPicturesReachesTheTraining) {
  for (const char* move : {"data.random_shift_pixels=6", "data.random_rotation_degrees=20", "data.random_scale=0.3"}) {
    const TrainResult moved = RunTrain(Digits(), absl::StrCat("moved-", std::string(move).substr(12, 5)), {"train.steps=1", move});
    ASSERT_EQ(moved.exit_code, 0) << moved.err;
    EXPECT_NE(moved.metrics[0]["loss"], TwoStages().metrics[0]["loss"]) << move;
  }
}

TEST(IdentityTest, OneStageGivesTheBytesOfTwo) { ExpectEqualRuns(TwoStages(), RunTrain(Digits(), "one-stage", {"pipeline.stages=1"})); }

TEST(IdentityTest, FourStagesGiveTheBytesOfTwo) { ExpectEqualRuns(TwoStages(), RunTrain(Digits(), "four-stages", {"pipeline.stages=4"})); }

TEST(IdentityTest, StagesOfUnevenLengthGiveTheBytesOfTwo) {
  ExpectEqualRuns(TwoStages(), RunTrain(Digits(), "three-stages", {"pipeline.stages=3", "pipeline.layers_per_stage=[1, 1, 2]"}));
}

TEST(IdentityTest, ATowerInTheFirstStageGivesTheBytesOfAService) {
  ExpectEqualRuns(TwoStages(), RunTrain(Digits(), "first-stage", {"vision.placement=first_stage"}));
}

TEST(IdentityTest, GpipeGivesTheBytesOf1F1B) { ExpectEqualRuns(TwoStages(), RunTrain(Digits(), "gpipe", {"pipeline.schedule=gpipe"})); }

TEST(IdentityTest, TiedEmbeddingsGiveEqualBytesOnOneTwoAndFourStages) {
  const TinyRun tied = WriteTinyRun("tied", TinyTiedConfig());
  const TrainResult one = RunTrain(tied, "one", {"pipeline.stages=1"});
  ExpectEqualRuns(one, RunTrain(tied, "two", {"pipeline.stages=2"}));
  ExpectEqualRuns(one, RunTrain(tied, "four", {"pipeline.stages=4"}));
  EXPECT_FALSE(Weights(one).contains("language_model.lm_head.weight"));
}

TEST(IdentityTest, TwoGradientGroupsGiveEqualBytesOnOneAndTwoStages) {
  const std::string groups = "train.gradient_groups=2";
  const TrainResult one = RunTrain(Digits(), "groups-one", {groups, "pipeline.stages=1"});
  ExpectEqualRuns(one, RunTrain(Digits(), "groups-two", {groups}));
  // Another order of addition: other bits, the same training.
  EXPECT_NE(Numbers(one), Numbers(TwoStages()));
  EXPECT_NEAR(one.metrics.back()["loss"], TwoStages().metrics.back()["loss"], 0.01);
}

TEST(IdentityTest, TwoComputeThreadsGiveEqualBytesOnOneAndTwoStages) {
  const std::string threads = "runtime.compute_threads=2";
  ExpectEqualRuns(RunTrain(Digits(), "threads-one", {threads, "pipeline.stages=1"}), RunTrain(Digits(), "threads-two", {threads}));
}

TEST(IdentityTest, MuonQkClipAndBalanceLossGiveEqualBytesOnOneTwoAndFourStages) {
  // Fresh logits are small: this threshold clips some heads in every step.
  const std::vector<std::string> options = {"train.steps=3", "optimizer.kind=muon", "optimizer.qk_clip_threshold=0.02",
                                            "train.balance_loss_weight=0.1", "train.expert_bias_rule=centred"};
  const auto with = [&](const std::string& stages) {
    std::vector<std::string> all = options;
    all.push_back("pipeline.stages=" + stages);
    return all;
  };
  const TrainResult two = RunTrain(Digits(), "muon-two", with("2"));
  ASSERT_EQ(two.exit_code, 0) << two.err;
  ExpectEqualRuns(two, RunTrain(Digits(), "muon-one", with("1")));
  ExpectEqualRuns(two, RunTrain(Digits(), "muon-four", with("4")));
  // What each option is worth here: without it the weights are others.
  int number = 0;
  for (const char* off : {"optimizer.kind=adamw", "optimizer.qk_clip_threshold=0", "train.balance_loss_weight=0", "train.expert_bias_rule=sign"}) {
    std::vector<std::string> all = with("2");
    all.push_back(off);
    const TrainResult without = RunTrain(Digits(), absl::StrCat("muon-off-", ++number), all);
    ASSERT_EQ(without.exit_code, 0) << without.err;
    EXPECT_THAT(Differing(Weights(two), Weights(without)), testing::Not(IsEmpty())) << off;
  }
}

TEST(IdentityTest, Bf16GivesEqualBytesOnOneAndTwoStages) {
  const std::vector<std::string> one = {"train.steps=2", "train.compute_type=bf16", "pipeline.stages=1", "pipeline.microbatches=2"};
  const std::vector<std::string> two = {"train.steps=2", "train.compute_type=bf16", "pipeline.stages=2", "pipeline.microbatches=2"};
  ExpectEqualRuns(RunTrain(Digits(), "bf16-one", one), RunTrain(Digits(), "bf16-two", two));
}

TEST(IdentityTest, WhatIsMadeAgainInTheBackwardGivesTheBytesOfWhatIsKept) {
  const std::vector<std::string> options = {"train.steps=3", "train.balance_loss_weight=0.1", "optimizer.kind=muon", "optimizer.qk_clip_threshold=0.02"};
  const TrainResult kept = RunTrain(Digits(), "recompute-none", options);
  ASSERT_EQ(kept.exit_code, 0) << kept.err;
  for (const std::string recompute : {"experts", "layers"}) {
    std::vector<std::string> all = options;
    all.push_back("train.recompute=" + recompute);
    ExpectEqualRuns(kept, RunTrain(Digits(), "recompute-" + recompute, all));
  }
}

// Samples without a picture; every third names what would be seen.
TarMembers TextSamples(int count) {
  const char* digits[] = {"zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"};
  TarMembers members;
  for (int i = 0; i < count; ++i) {
    const char* digit = digits[i % 10];
    members.emplace_back(absl::StrCat("text-", i, ".json"), RecordJson(absl::StrCat("Which digit is ", digit, "?"), digit));
  }
  return members;
}

TEST(IdentityTest, TextAloneTrainsAsWithoutAVisionServiceAndLeavesVisionAsItIs) {
  const std::string shard = WriteTar(FreshFolder("text-data") + "/text.tar", TextSamples(60));
  const TinyRun text = WriteTinyRun("text", TinyConfig(), {shard});
  const std::vector<std::string> few = {"train.steps=3", "optimizer.weight_decay=0"};
  auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), few.begin(), few.end());
    return more;
  };
  const TrainResult service = RunTrain(text, "service", few);
  ASSERT_EQ(service.exit_code, 0) << service.err;
  ASSERT_THAT(service.metrics, SizeIs(3));
  for (const auto& step : service.metrics) EXPECT_EQ(step["images"], 0);
  ExpectEqualRuns(service, RunTrain(text, "first-stage", with({"vision.placement=first_stage"})));

  // Frozen parts keep the bytes that were drawn.
  const TrainResult frozen = RunTrain(text, "frozen", with({"optimizer.groups=[{match: vision, frozen: true}, {match: projector, frozen: true}]"}));
  ASSERT_EQ(frozen.exit_code, 0) << frozen.err;
  const Tensors drawn = Select(Weights(frozen), kVisionParts);
  ASSERT_GT(drawn.size(), 20U);
  EXPECT_THAT(Differing(Select(Weights(service), kVisionParts), drawn), IsEmpty());
  EXPECT_EQ(Numbers(service), Numbers(frozen));

  // With decay, idle parts move unless the run says that they stay.
  const TrainResult decayed = RunTrain(text, "decayed", {"train.steps=2", "optimizer.weight_decay=0.5"});
  const TrainResult idle = RunTrain(text, "idle", {"train.steps=2", "optimizer.weight_decay=0.5", "train.step_idle_parts=false"});
  ASSERT_EQ(decayed.exit_code, 0) << decayed.err;
  ASSERT_EQ(idle.exit_code, 0) << idle.err;
  EXPECT_THAT(Differing(Select(Weights(idle), kVisionParts), drawn), IsEmpty());
  EXPECT_THAT(Differing(Select(Weights(decayed), kVisionParts), drawn), testing::Not(IsEmpty()));
}

TEST(IdentityTest, VisionWeightsThatAreNotNumbersDoNotReachTextAlone) {
  const std::string shard = WriteTar(FreshFolder("nan-data") + "/text.tar", TextSamples(60));
  const TinyRun text = WriteTinyRun("nan", TinyConfig(), {shard});
  const TrainResult start = RunTrain(text, "start", {"train.steps=1", "optimizer.weight_decay=0"});
  ASSERT_EQ(start.exit_code, 0) << start.err;
  // The same weights twice: as they are, and with a tower of NaN.
  std::map<std::string, std::string> folders;
  for (const std::string name : {"good", "bad"}) {
    const std::string folder = folders[name] = FreshFolder(absl::StrCat("nan-model-", name));
    std::filesystem::copy_file(text.folder + "/config.json", folder + "/config.json");
    std::vector<SafetensorsFile> files;
    std::vector<StoredTensor> tensors;
    std::vector<std::vector<float>> nan;
    for (const auto& entry : std::filesystem::directory_iterator(NewestCheckpoint(start.run_folder))) {
      const std::string file = entry.path().filename().string();
      if (!absl::StartsWith(file, "model") || !absl::EndsWith(file, ".safetensors")) continue;
      files.push_back(*SafetensorsFile::Open(entry.path().string()));
    }
    for (const SafetensorsFile& file : files) {
      for (StoredTensor tensor : file.tensors()) {
        if (name == "bad" && absl::StartsWith(tensor.name, "vision_tower.")) {
          nan.emplace_back(tensor.num_elements(), std::nanf(""));
          tensor.data = nan.back().data();
        }
        tensors.push_back(tensor);
      }
    }
    ASSERT_FALSE(tensors.empty());
    ASSERT_TRUE(WriteSafetensors(folder + "/model.safetensors", tensors).ok());
  }
  auto train = [&](const std::string& name) {
    std::ofstream(text.run_file) << "model: {path: " << folders[name] << "}\n"
                                 << "data: {train: " << shard << ", tokenizer: " << SOURCE_DIR << "/examples/digits/tokenizer}\n"
                                 << "pipeline: {microbatch_tokens: 256}\ntrain: {steps: 2}\noptimizer: {learning_rate: 4e-3}\n"
                                 << "runtime: {step_timeout_seconds: 60, heartbeat_timeout_seconds: 60}\n";
    return RunTrain(text, name, {});
  };
  const TrainResult good = train("good"), bad = train("bad");
  ASSERT_EQ(good.exit_code, 0) << good.err;
  ASSERT_EQ(bad.exit_code, 0) << bad.err;
  ASSERT_THAT(good.metrics, SizeIs(2));
  EXPECT_TRUE(std::isfinite(bad.metrics.back()["loss"].get<double>()));
  EXPECT_EQ(Numbers(good), Numbers(bad));
  EXPECT_THAT(Differing(Select(Weights(good), {"language_model."}), Select(Weights(bad), {"language_model."})), IsEmpty());
}

TEST(IdentityTest, StepsWithAndWithoutPicturesTakeTurns) {
  TarMembers members = TextSamples(12);
  for (int i = 0; i < 12; ++i) {
    const std::string picture = absl::StrCat("picture-", i, ".0.png");
    members.emplace_back(absl::StrCat("picture-", i, ".json"), RecordJson("<image>Which digit is this?", "five", {picture}));
    members.emplace_back(picture, PngOf(28, 28, static_cast<uint8_t>(20 * i), 50, 200));
  }
  const std::string shard = WriteTar(FreshFolder("turns-data") + "/turns.tar", members);
  const TinyRun turns = WriteTinyRun("turns", TinyConfig(), {shard});
  // One sample a window and one microbatch a step: every step has one sample.
  const std::vector<std::string> single = {"train.steps=12", "pipeline.microbatches=1", "data.packing_window=1"};
  const TrainResult two = RunTrain(turns, "two", single);
  ASSERT_EQ(two.exit_code, 0) << two.err;
  int with = 0, changes = 0;
  for (size_t i = 0; i < two.metrics.size(); ++i) {
    with += two.metrics[i]["images"] > 0;
    if (i > 0) changes += two.metrics[i]["images"] != two.metrics[i - 1]["images"];
  }
  EXPECT_GT(with, 0);
  EXPECT_LT(with, 12);
  EXPECT_GT(changes, 2);
  std::vector<std::string> one_stage = single;
  one_stage.insert(one_stage.end(), {"pipeline.stages=1", "vision.placement=first_stage"});
  ExpectEqualRuns(two, RunTrain(turns, "one", one_stage));
}

TEST(IdentityTest, AStepWithoutATrainedLabelIsSkippedAndLeavesNoMark) {
  // Samples that are all alike, one of them without an answer: the run without it takes the same steps.
  const std::string question = R"({"messages": [{"role": "user", "content": "Which digit is nine?"}]})";
  TarMembers normal, mixed;
  for (int i = 0; i < 4; ++i) {
    const std::string name = absl::StrCat("sample-", i, ".json");
    const std::string record = RecordJson("Which digit is nine?", "nine");
    normal.emplace_back(name, record);
    mixed.emplace_back(name, i == 1 ? question : record);
  }
  const std::string folder = FreshFolder("empty-data");
  const std::vector<std::string> shared = {"pipeline.microbatches=1", "data.packing_window=1", "optimizer.weight_decay=0",
                                           "optimizer.schedule={kind: constant}"};
  auto train = [&](const std::string& name, const TarMembers& members, const std::string& steps) {
    const TinyRun run = WriteTinyRun("empty-" + name, TinyConfig(), {WriteTar(folder + "/" + name + ".tar", members)});
    std::vector<std::string> overrides = shared;
    overrides.push_back("train.steps=" + steps);
    return RunTrain(run, name, overrides);
  };
  const TrainResult with = train("mixed", mixed, "8"), without = train("normal", normal, "6");
  ASSERT_EQ(with.exit_code, 0) << with.err;
  ASSERT_EQ(without.exit_code, 0) << without.err;
  ASSERT_THAT(with.metrics, SizeIs(8));
  std::vector<std::string> taken, skipped, expected;
  for (const auto& step : with.metrics) {
    (step.contains("skip_reason") ? skipped : taken).push_back(absl::StrCat(step["loss"].dump(), " ", step["grad_norm"].dump()));
    if (!step.contains("skip_reason")) continue;
    EXPECT_EQ(step["skip_reason"], "empty");
    EXPECT_EQ(step["trained_labels"], 0);
  }
  for (const auto& step : without.metrics) expected.push_back(absl::StrCat(step["loss"].dump(), " ", step["grad_norm"].dump()));
  EXPECT_THAT(skipped, testing::ElementsAre("0.0 0.0", "0.0 0.0"));
  EXPECT_EQ(taken, expected);
  EXPECT_THAT(Differing(Weights(with), Weights(without)), IsEmpty());
  EXPECT_THAT(Differing(Moments(with), Moments(without)), IsEmpty());
}

TEST(IdentityTest, PicturesOfDifferentShapesTrainAlikeOnOneAndTwoStages) {
  // Width x height; every picture has its own pattern.
  const std::pair<int32_t, int32_t> sizes[] = {{28, 84}, {84, 28}, {56, 56}};
  TarMembers members;
  for (int i = 0; i < 30; ++i) {
    const auto [width, height] = sizes[i % 3];
    RgbImage image{width, height, {}};
    for (int32_t y = 0; y < height; ++y) {
      for (int32_t x = 0; x < width; ++x) {
        image.pixels.insert(image.pixels.end(), {static_cast<uint8_t>(x * 3 + i), static_cast<uint8_t>(y * 3), static_cast<uint8_t>(i * 8)});
      }
    }
    const std::string picture = absl::StrCat(i, ".0.png");
    members.emplace_back(absl::StrCat(i, ".json"), RecordJson("<image>Which digit is this?", i % 3 == 0 ? "one" : "two", {picture}));
    members.emplace_back(picture, PngBytes(image));
  }
  const std::string shard = WriteTar(FreshFolder("shapes-data") + "/shapes.tar", members);
  const TinyRun shapes = WriteTinyRun("shapes", TinyConfig(), {shard});
  const std::vector<std::string> four = {"train.steps=4", "pipeline.microbatch_tokens=96"};
  const TrainResult two = RunTrain(shapes, "two", four);
  std::vector<std::string> one = four;
  one.push_back("pipeline.stages=1");
  ExpectEqualRuns(two, RunTrain(shapes, "one", one));
  ASSERT_THAT(two.metrics, SizeIs(4));

  // What the dataloader must have announced, and so what the edges were checked against: 2x6 and 6x2 patches are three feature rows,
  // 4x4 are four.
  StepSourceOptions options = DigitsOptions({shard});
  options.microbatch_tokens = 96;
  options.seed = 7;
  const auto source = OpenStepSource(options);
  ASSERT_TRUE(source.ok()) << source.status();
  data::v1::DataCursor cursor;
  std::set<std::pair<uint32_t, uint32_t>> grids;
  for (uint64_t number = 1; number <= 4; ++number) {
    const absl::StatusOr<Step> step = (*source)->Make(number, cursor);
    ASSERT_TRUE(step.ok()) << step.status();
    cursor = step->manifest.next_cursor();
    uint64_t tokens = 0, images = 0;
    for (const auto& microbatch : step->manifest.microbatches()) {
      uint32_t rows = 0;
      for (const auto& grid : microbatch.grids()) {
        grids.emplace(grid.rows(), grid.columns());
        rows += grid.rows() == grid.columns() ? 4 : 3;
      }
      EXPECT_EQ(microbatch.feature_rows(), rows);
      tokens += microbatch.tokens();
      images += static_cast<uint64_t>(microbatch.grids_size());
    }
    EXPECT_EQ(two.metrics[number - 1]["tokens"], tokens);
    EXPECT_EQ(two.metrics[number - 1]["images"], images);
  }
  EXPECT_THAT(grids, testing::ElementsAre(std::pair(2U, 6U), std::pair(4U, 4U), std::pair(6U, 2U)));
}

}  // namespace
}  // namespace moonpipe
