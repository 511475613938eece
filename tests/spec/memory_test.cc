#include "moonpipe/spec/memory.h"

#include "gtest/gtest.h"

namespace moonpipe {
namespace {

ModelConfig Model() {
  auto config = ReadModelConfig(TEST_DATA_DIR "/fixtures/kimi_vl_a3b/config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

TEST(MemoryTest, StateIsFourFloatsAParameterAndOneWhereNothingIsTrained) {
  const ModelConfig model = Model();
  const PartRange all{0, model.text.num_hidden_layers, true, true, true};
  int64_t parameters = 0;
  int64_t buffers = 0;
  for (const TensorSpec& tensor : ListTensors(model, all))
    (tensor.trainable ? parameters : buffers) += tensor.num_elements();
  ASSERT_GT(buffers, 0);
  const MemoryEstimate estimate = EstimateMemory(model, all, {.microbatch_tokens = 32});
  EXPECT_EQ(estimate.parameters, parameters + buffers);
  EXPECT_EQ(estimate.state_bytes(), 16 * parameters + 4 * buffers);
  const MemoryEstimate frozen = EstimateMemory(model, all, {.microbatch_tokens = 32, .frozen_parameters = parameters});
  EXPECT_EQ(frozen.state_bytes(), 4 * (parameters + buffers));
}

TEST(MemoryTest, TheStatesOfTheStagesAddUpToTheWhole) {
  const ModelConfig model = Model();
  const int64_t layers = model.text.num_hidden_layers;
  const MemoryOptions options{.microbatch_tokens = 32};
  const int64_t whole = EstimateMemory(model, {0, layers, true, true, true}, options).state_bytes();
  const int64_t first = EstimateMemory(model, {0, 1, true, false, true}, options).state_bytes();
  const int64_t rest = EstimateMemory(model, {1, layers, false, true, false}, options).state_bytes();
  EXPECT_EQ(first + rest, whole);
}

TEST(MemoryTest, ActivationsGrowWithTokensAndWithLiveMicrobatches) {
  const ModelConfig model = Model();
  const PartRange middle{1, 3, false, false, false};
  const int64_t once = EstimateMemory(model, middle, {.microbatch_tokens = 32}).activations_bytes;
  EXPECT_GT(once, 0);
  EXPECT_EQ(EstimateMemory(model, middle, {.microbatch_tokens = 64}).activations_bytes, 2 * once);
  EXPECT_EQ(EstimateMemory(model, middle, {.microbatch_tokens = 32, .live_microbatches = 3}).activations_bytes,
            3 * once);
  const PartRange last{1, 3, false, true, false};
  EXPECT_GE(EstimateMemory(model, last, {.microbatch_tokens = 32}).working_bytes, 2 * 4 * 32 * model.text.vocab_size);
}

TEST(MemoryTest, GradientGroupsAndTiedHeadsHaveGradientsOfTheirOwn) {
  ModelConfig model = Model();
  const PartRange all{0, model.text.num_hidden_layers, true, true, true};
  const int64_t once = EstimateMemory(model, all, {.microbatch_tokens = 32}).gradients_bytes;
  EXPECT_EQ(EstimateMemory(model, all, {.microbatch_tokens = 32, .gradient_groups = 3}).gradients_bytes, 3 * once);
  model.text.tie_word_embeddings = true;
  EXPECT_EQ(EstimateMemory(model, all, {.microbatch_tokens = 32}).gradients_bytes, once);
}

TEST(MemoryTest, DevicesOfAStageShareExpertsWidthsAndTokens) {
  const ModelConfig model = Model();
  const PartRange middle{1, 3, false, false, false};
  const MemoryEstimate one = EstimateMemory(model, middle, {.microbatch_tokens = 32});
  const MemoryEstimate context = EstimateMemory(model, middle, {.microbatch_tokens = 32, .parallel = {.context = 4}});
  EXPECT_EQ(context.state_bytes(), one.state_bytes());
  EXPECT_LT(context.activations_bytes, one.activations_bytes / 2);
  int64_t routed = 0;
  for (const TensorSpec& tensor : ListTensors(model, middle)) routed += tensor.expert >= 0 ? tensor.num_elements() : 0;
  const MemoryEstimate expert = EstimateMemory(model, middle, {.microbatch_tokens = 32, .parallel = {.expert = 4}});
  EXPECT_EQ(one.parameters - expert.parameters, routed / 4 * 3);
  EXPECT_EQ(expert.activations_bytes, one.activations_bytes);
}

}  // namespace
}  // namespace moonpipe
