#include "moonpipe/pipeline/stage_split.h"

#include <algorithm>
#include <functional>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int64_t> Counts(const std::vector<PartRange>& ranges) {
  std::vector<int64_t> counts;
  for (const PartRange& range : ranges) counts.push_back(range.end_layer - range.first_layer);
  return counts;
}

// Every layer once, in order; ends where they belong.
void ExpectPartition(const std::vector<PartRange>& ranges, size_t layers) {
  int64_t next = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    EXPECT_EQ(ranges[i].first_layer, next);
    EXPECT_GT(ranges[i].end_layer, next);
    EXPECT_EQ(ranges[i].has_embedding, i == 0);
    EXPECT_EQ(ranges[i].has_head, i + 1 == ranges.size());
    EXPECT_FALSE(ranges[i].has_vision);
    next = ranges[i].end_layer;
  }
  EXPECT_EQ(next, static_cast<int64_t>(layers));
}

double Maximum(const SplitCosts& costs, const std::vector<PartRange>& ranges) {
  double maximum = 0;
  for (const PartRange& range : ranges) {
    double cost = (range.has_embedding ? costs.embedding : 0) + (range.has_head ? costs.head : 0);
    for (int64_t i = range.first_layer; i < range.end_layer; ++i) cost += costs.layers[static_cast<size_t>(i)];
    maximum = std::max(maximum, cost);
  }
  return maximum;
}

TEST(StageSplitTest, EqualLayersAreSpreadEvenly) {
  const SplitCosts costs{0, 0, std::vector<double>(7, 1.0)};
  auto counts = Counts(*SplitLayers(costs, 3));
  std::sort(counts.begin(), counts.end());
  EXPECT_THAT(counts, ElementsAre(2, 2, 3));
}

TEST(StageSplitTest, ACostlyHeadTakesLayersFromTheLastStage) {
  EXPECT_THAT(Counts(*SplitLayers({0, 3, std::vector<double>(9, 1.0)}, 3)), ElementsAre(4, 4, 1));
  EXPECT_THAT(Counts(*SplitLayers({2, 0, std::vector<double>(7, 1.0)}, 3)), ElementsAre(1, 3, 3));
}

TEST(StageSplitTest, NoCutIsBetterThanTheOneThatIsTaken) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    SplitCosts costs{static_cast<double>(random() % 5), static_cast<double>(random() % 9), {}};
    const size_t layers = 1 + random() % 8;
    for (size_t i = 0; i < layers; ++i) costs.layers.push_back(static_cast<double>(1 + random() % 6));
    const int32_t stages = 1 + static_cast<int32_t>(random() % layers);
    auto ranges = SplitLayers(costs, stages);
    ASSERT_TRUE(ranges.ok());
    ExpectPartition(*ranges, layers);
    double best = 1e9;
    std::vector<uint32_t> counts;
    std::function<void(size_t)> all_cuts = [&](size_t left) {
      if (counts.size() + 1 == static_cast<size_t>(stages)) {
        counts.push_back(static_cast<uint32_t>(left));
        if (left > 0)
          best = std::min(best, Maximum(costs, *SplitLayersAs(counts, static_cast<int64_t>(layers), stages)));
        counts.pop_back();
        return;
      }
      for (size_t n = 1; n < left; ++n) {
        counts.push_back(static_cast<uint32_t>(n));
        all_cuts(left - n);
        counts.pop_back();
      }
    };
    all_cuts(layers);
    EXPECT_EQ(Maximum(costs, *ranges), best);
  }
}

TEST(StageSplitTest, ExpertLayersWeighWhatATokenUses) {
  const ModelConfig model = *ReadModelConfig(TEST_DATA_DIR "/fixtures/kimi_vl_a3b/config.json");
  const SplitCosts costs = CostsOf(model);
  ASSERT_EQ(costs.layers.size(), 4U);
  EXPECT_EQ(costs.head, 512.0 * 64);
  // Attention, router, and 3 chosen plus 2 shared of its 8 + 2 experts.
  EXPECT_EQ(costs.layers[1], 22528.0 + 64 * 8 + 3 * 64 * 32 * (3 + 2));
  ExpectPartition(*SplitLayers(costs, 4), 4);
}

TEST(StageSplitTest, GivenCountsAreTakenAndChecked) {
  auto ranges = SplitLayersAs({1, 3}, 4, 2);
  ASSERT_TRUE(ranges.ok());
  ExpectPartition(*ranges, 4);
  EXPECT_THAT(Counts(*ranges), ElementsAre(1, 3));
  EXPECT_THAT(std::string(SplitLayersAs({1, 2}, 4, 2).status().message()),
              AllOf(HasSubstr("1 + 2 adds up to 3"), HasSubstr("has 4")));
  EXPECT_THAT(std::string(SplitLayersAs({1, 2, 1}, 4, 2).status().message()),
              AllOf(HasSubstr("has 3 entries"), HasSubstr("stages is 2")));
  EXPECT_THAT(std::string(SplitLayersAs({4, 0}, 4, 2).status().message()), HasSubstr("layers_per_stage[1] is 0"));
}

TEST(StageSplitTest, MoreStagesThanLayersAreRefusedWithBothNumbers) {
  EXPECT_THAT(std::string(SplitLayers({0, 0, {1, 1}}, 3).status().message()),
              AllOf(HasSubstr("is 3"), HasSubstr("2 decoder layers")));
  EXPECT_FALSE(SplitLayers({0, 0, {1, 1}}, 0).ok());
}

}  // namespace
}  // namespace moonpipe
