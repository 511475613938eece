// What a step must come to, whatever it is made of: labels in several microbatches, a microbatch without any, pictures whose features
// are larger than a message usually may be.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/data/testing_files.h"
#include "tests/integration/tiny.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::map<std::string, std::string> Weights(const TrainResult& run) { return ReadTensors(NewestCheckpoint(run.run_folder), "model"); }

// Of fp32 tensors: norm of the difference over norm of the first.
double RelativeDifference(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (size_t i = 0; i + sizeof(float) <= a.size(); i += sizeof(float)) {
    float x = 0, y = 0;
    std::memcpy(&x, a.data() + i, sizeof(x));
    std::memcpy(&y, b.data() + i, sizeof(y));
    difference += std::pow(double{x} - y, 2);
    norm += std::pow(double{x}, 2);
  }
  return std::sqrt(difference / std::max(norm, 1e-30));
}

bool AllZero(const std::string& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; });
}

// One long answer and one short one: their microbatches have different numbers of trained labels.
TarMembers ShortAndLong() {
  return {{"0.json", RecordJson("Which digit is nine?", "nine")},
          {"1.json", RecordJson("Which digits are there?", "zero one two three four five six seven eight nine")}};
}

// The second record has no answer: nothing in it is trained.
TarMembers OneWithoutAnAnswer() {
  return {{"0.json", RecordJson("Which digit is nine?", "nine")},
          {"1.json", R"({"messages": [{"role": "user", "content": "Which digit is nine?"}]})"}};
}

// The update follows the gradient's size instead of its sign, so that a difference of rounding stays one.
const std::vector<std::string> kTwoSamples = {"data.packing_window=2", "optimizer.epsilon=1", "optimizer.learning_rate=0.5",
                                              "optimizer.schedule={kind: constant}", "train.expert_bias_rate=0",
                                              "optimizer.weight_decay=0"};

TrainResult TrainOn(const std::string& name, const TarMembers& members, std::vector<std::string> overrides) {
  const TinyRun run = WriteTinyRun("steps-" + name, TinyConfig(), {WriteTar(FreshFolder("steps-data-" + name) + "/data.tar", members)});
  overrides.insert(overrides.end(), kTwoSamples.begin(), kTwoSamples.end());
  const TrainResult result = RunTrain(run, name, overrides);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return result;
}

TEST(StepsTest, TwoSamplesInOneMicrobatchInTwoAndInTheOtherOrderAreOneStep) {
  const TrainResult joined = TrainOn("joined", ShortAndLong(), {"train.steps=1", "pipeline.microbatches=1", "pipeline.microbatch_tokens=256"});
  const std::vector<std::string> apart = {"train.steps=1", "pipeline.microbatches=2", "pipeline.microbatch_tokens=48"};
  const TrainResult one_way = TrainOn("apart", ShortAndLong(), apart);
  TarMembers exchanged = ShortAndLong();
  std::swap(exchanged[0].second, exchanged[1].second);
  const TrainResult other_way = TrainOn("exchanged", exchanged, apart);
  ASSERT_THAT(joined.metrics, SizeIs(1));
  for (const TrainResult* run : {&one_way, &other_way}) {
    ASSERT_THAT(run->metrics, SizeIs(1));
    EXPECT_EQ(run->metrics[0]["trained_labels"], joined.metrics[0]["trained_labels"]);
    EXPECT_EQ(run->metrics[0]["samples"], 2);
    const double loss = joined.metrics[0]["loss"];
    EXPECT_NEAR(run->metrics[0]["loss"].get<double>(), loss, 1e-5 * loss);
    for (const auto& [name, bytes] : Weights(joined)) EXPECT_LT(RelativeDifference(bytes, Weights(*run)[name]), 1e-5) << name;
  }
}

TEST(StepsTest, AMicrobatchWithoutATrainedLabelChangesNothing) {
  const std::vector<std::string> two = {"train.steps=2", "pipeline.microbatches=2", "pipeline.microbatch_tokens=32"};
  const TrainResult with = TrainOn("with", OneWithoutAnAnswer(), two);
  TarMembers alone = OneWithoutAnAnswer();
  alone.pop_back();
  const TrainResult without = TrainOn("without", alone, {"train.steps=2", "pipeline.microbatches=1", "pipeline.microbatch_tokens=32"});
  ASSERT_THAT(with.metrics, SizeIs(2));
  ASSERT_THAT(without.metrics, SizeIs(2));
  for (size_t step = 0; step < 2; ++step) {
    EXPECT_EQ(with.metrics[step]["samples"], 2);
    EXPECT_EQ(with.metrics[step]["loss"].dump(), without.metrics[step]["loss"].dump());
    EXPECT_EQ(with.metrics[step]["grad_norm"].dump(), without.metrics[step]["grad_norm"].dump());
  }
  for (const auto& [name, bytes] : Weights(with)) EXPECT_TRUE(bytes == Weights(without)[name]) << name;
}

// 868x896, 896x896 and 1000x1000 pixels are 992, 1,024 and 1,089 positions: of the wide model's features 8.1 to 8.9 MB a message.
std::string PictureShard(const std::string& name, const std::vector<std::pair<int32_t, int32_t>>& sizes) {
  TarMembers members;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const std::string picture = absl::StrCat(i, ".0.png");
    members.emplace_back(absl::StrCat(i, ".json"), RecordJson("<image>Which digit is this?", "nine", {picture}));
    members.emplace_back(picture, PngOf(sizes[i].first, sizes[i].second, 200, static_cast<uint8_t>(20 * i), 90));
  }
  return WriteTar(FreshFolder("steps-pictures-" + name) + "/data.tar", members);
}

nlohmann::json WideConfig() {
  nlohmann::json config = TinyConfig();
  config["text_config"]["hidden_size"] = 2048;
  config["text_config"]["num_hidden_layers"] = 2;
  return config;
}

TEST(StepsTest, FeaturesLargerThanADefaultMessageTrainAndTheirGradientsComeBack) {
  const TinyRun run = WriteTinyRun("steps-large", WideConfig(), {PictureShard("three", {{868, 896}, {896, 896}, {1000, 1000}})});
  const TrainResult result = RunTrain(run, "large", {"train.steps=1", "pipeline.microbatches=3", "pipeline.microbatch_tokens=1130",
                                                     "data.packing_window=3"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  ASSERT_THAT(result.metrics, SizeIs(1));
  EXPECT_EQ(result.metrics[0]["images"], 3);
  EXPECT_TRUE(std::isfinite(result.metrics[0]["loss"].get<double>()));
  // The tower's moments are the gradients that came back.
  int moved = 0;
  for (const auto& [name, bytes] : ReadTensors(NewestCheckpoint(result.run_folder), "optimizer")) {
    if (!absl::StartsWith(name, "exp_avg.vision_tower.") || !absl::EndsWith(name, "weight")) continue;
    EXPECT_FALSE(AllZero(bytes)) << name;
    ++moved;
  }
  EXPECT_GT(moved, 10);
}

TEST(StepsTest, EightLargePicturesInOneMicrobatchTrain) {
  const TinyRun run = WriteTinyRun("steps-eight", WideConfig(), {PictureShard("eight", std::vector<std::pair<int32_t, int32_t>>(8, {1000, 1000}))});
  const TrainResult result = RunTrain(run, "eight", {"train.steps=1", "pipeline.microbatches=1", "pipeline.microbatch_tokens=9000",
                                                     "data.packing_window=8", "pipeline.stages=1"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  ASSERT_THAT(result.metrics, SizeIs(1));
  EXPECT_EQ(result.metrics[0]["images"], 8);
  EXPECT_GT(result.metrics[0]["tokens"].get<int>(), 8 * 1089);
}

TEST(StepsTest, FeaturesBeyondTheConfiguredLimitAreRefusedWithBothSizes) {
  const TinyRun run = WriteTinyRun("steps-limit", WideConfig(), {PictureShard("limit", {{1000, 1000}})});
  const TrainResult result = RunTrain(run, "limit", {"train.steps=1", "pipeline.microbatches=1", "pipeline.microbatch_tokens=1130",
                                                     "data.packing_window=1", "runtime.max_edge_message_bytes=5242880"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, AllOf(HasSubstr("1089 feature rows in 8921088 bytes"), HasSubstr("the limit is 5242880")));
  EXPECT_THAT(result.metrics, SizeIs(0));
}

}  // namespace
}  // namespace moonpipe
