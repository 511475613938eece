#include "moonpipe/spec/parallel.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/spec/device_peaks.h"

namespace moonpipe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

ModelConfig Model() {
  auto config = ReadModelConfig(TEST_DATA_DIR "/fixtures/kimi_vl_a3b/config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

TEST(ParallelTest, TheNearestDivisorsAreBelowAndAbove) {
  EXPECT_EQ(NearestDivisors(12, 5), "4 and 6");
  EXPECT_EQ(NearestDivisors(12, 12), "6");
  EXPECT_EQ(NearestDivisors(12, 100), "12");
  EXPECT_EQ(NearestDivisors(7, 1), "7");
}

TEST(ParallelTest, SizesThatDivideArePassed) {
  EXPECT_THAT(CheckParallel(Model(), {.data = 2, .expert = 4, .tensor = 4, .context = 8}, 16, 64), IsEmpty());
}

TEST(ParallelTest, EachSizeIsRefusedByItselfWithBothNumbers) {
  EXPECT_THAT(CheckParallel(Model(), {.data = 3}, 4, 64),
              ElementsAre("data 3 does not divide microbatches 4; the nearest that fit are 2 and 4, or 3 or 6 microbatches"));
  EXPECT_THAT(CheckParallel(Model(), {.expert = 16}, 16, 64),
              ElementsAre("expert 16 does not divide n_routed_experts 8; the nearest that fits is 8"));
  EXPECT_THAT(CheckParallel(Model(), {.tensor = 3}, 4, 64),
              ElementsAre("tensor 3 does not divide num_attention_heads 4; the nearest that fit are 2 and 4"));
  EXPECT_THAT(CheckParallel(Model(), {.context = 5}, 4, 64),
              ElementsAre("context 5 does not divide microbatch_tokens 64; the nearest that fit are 4 and 8"));
  EXPECT_THAT(CheckParallel(Model(), {.data = 0, .tensor = -1}, 4, 64),
              ElementsAre("data is 0; the least is 1", "tensor is -1; the least is 1"));
}

// 16 heads over 8 devices would do; the shared experts' width of 2 x 5 would not.
TEST(ParallelTest, TensorMustDivideEveryWidth) {
  ModelConfig model = Model();
  model.text.num_attention_heads = 16;
  model.text.moe_intermediate_size = 20;
  EXPECT_THAT(CheckParallel(model, {.tensor = 8}, 4, 64),
              ElementsAre("tensor 8 does not divide moe_intermediate_size 20; the nearest that fits is 4"));
}

TEST(ParallelTest, WhatEveryHeadReadsIsWholeOnEveryDevice) {
  const ParallelSizes sizes{.expert = 4, .tensor = 2};
  for (const TensorSpec& tensor : ListTensors(Model())) {
    const int64_t all = tensor.num_elements();
    const int64_t mine = ElementsPerDevice(tensor, sizes);
    const bool whole = tensor.part != ModelPartKind::kDecoder || tensor.name.find("norm") != std::string::npos ||
                       tensor.name.find("kv_a_proj") != std::string::npos || tensor.name.find("mlp.gate.") != std::string::npos;
    EXPECT_EQ(mine, whole ? all : tensor.expert >= 0 ? all / 8 : all / 2) << tensor.name;
  }
}

TEST(DevicePeaksTest, TheFirstNameThatOccursCounts) {
  EXPECT_EQ(FindDevicePeak("NVIDIA H200")->flops_per_second, 989e12);
  EXPECT_EQ(FindDevicePeak("NVIDIA H20")->flops_per_second, 148e12);
  EXPECT_EQ(FindDevicePeak("NVIDIA GB200 NVL72")->flops_per_second, 2.5e15);
  EXPECT_EQ(FindDevicePeak("NVIDIA B200")->flops_per_second, 2.25e15);
  EXPECT_EQ(FindDevicePeak("NVIDIA H100 PCIe")->flops_per_second, 756e12);
  EXPECT_EQ(FindDevicePeak("NVIDIA H100 80GB HBM3")->flops_per_second, 989e12);
  EXPECT_EQ(FindDevicePeak("nvidia l40s")->flops_per_second, 362e12);
}

TEST(DevicePeaksTest, AnUnknownDeviceHasNoPeak) {
  EXPECT_FALSE(FindDevicePeak("NVIDIA GeForce RTX 3060").has_value());
  EXPECT_FALSE(FindDevicePeak("").has_value());
}

TEST(DevicePeaksTest, EveryEntryHasASourceAndIsReached) {
  for (const DevicePeak& peak : DevicePeaks()) {
    EXPECT_FALSE(peak.source.empty()) << peak.match;
    EXPECT_EQ(FindDevicePeak(peak.match)->match, peak.match);
  }
  const auto hidden = ParseDevicePeaks(R"({"devices": [{"match": "H20", "bf16": 1, "source": "a"}, {"match": "H200", "bf16": 2, "source": "b"}]})");
  EXPECT_THAT(std::string(hidden.status().message()), HasSubstr("H200 is never reached: H20 stands before it"));
  EXPECT_FALSE(ParseDevicePeaks(R"({"devices": [{"match": "X", "bf16": 1}]})").ok());
}

}  // namespace
}  // namespace moonpipe
