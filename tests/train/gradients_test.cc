#include "moonpipe/train/gradients.h"

#include <torch/torch.h>

#include <cmath>
#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/model/fresh_weights.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Key;
using ::testing::Not;

constexpr char kNorm[] = "language_model.model.norm.weight";
constexpr char kExpert[] = "language_model.model.layers.1.mlp.experts.3.up_proj.weight";
constexpr char kExpertStack[] = "language_model.model.layers.1.mlp.experts.up_proj.weight";
constexpr char kEmbedding[] = "language_model.model.embed_tokens.weight";

ParameterStore Store(const nlohmann::json& config, const PartRange& range) {
  return ParameterStore(*ParseModelConfig(config.dump()), range);
}
PartRange Whole() {
  return {.first_layer = 0, .end_layer = 4, .has_embedding = true, .has_head = true, .has_vision = true};
}

// Gives microbatch i the gradient values[i] in every entry of `name`; the sum that results.
float SumOver(uint32_t groups, const std::vector<float>& values, const char* name = kNorm) {
  ParameterStore store = Store(TinyConfig(), Whole());
  DrawFreshWeights(1, store);
  GradientAccumulator gradients(&store, groups);
  gradients.Begin();
  for (uint32_t i = 0; i < values.size(); ++i) {
    gradients.Select(i);
    (store.Get(name) * values[i]).sum().backward();
  }
  gradients.Finish();
  gradients.Finish();  // once a step
  return store.Get(name).grad().flatten()[0].item<float>();
}

// In fp32 1e8 + 1 is 1e8, so each order of addition shows.
const std::vector<float> kOrdered = {1e8F, 1, -1e8F, 1};

TEST(GradientsTest, OneGroupAddsInTheOrderOfMicrobatches) { EXPECT_EQ(SumOver(1, kOrdered), 1); }

TEST(GradientsTest, AGroupHoldsEveryGthMicrobatch) {
  // (1e8 - 1e8) + (1 + 1)
  EXPECT_EQ(SumOver(2, kOrdered), 2);
}

TEST(GradientsTest, GroupsAreSummedAsATreeOfNeighbours) {
  // (1e8 + 1) + (-1e8 + 1)
  EXPECT_EQ(SumOver(4, kOrdered), 0);
  // Three groups: (1e8 + 1) - 1e8, the odd one last.
  EXPECT_EQ(SumOver(3, {1e8F, 1, -1e8F}), 0);
  // Five: ((1 + 1e8) + (-1e8 + 0)) + 7; from left to right alone it would be the same, from right to left 8.
  EXPECT_EQ(SumOver(5, {1, 1e8F, -1e8F, 0, 7}), 7);
}

TEST(GradientsTest, MoreGroupsThanMicrobatchesAddZeros) { EXPECT_EQ(SumOver(8, {3, 4}), 7); }

TEST(GradientsTest, AStepBeginsAtZero) {
  ParameterStore store = Store(TinyConfig(), Whole());
  DrawFreshWeights(1, store);
  GradientAccumulator gradients(&store, 2);
  for (int step = 0; step < 2; ++step) {
    gradients.Begin();
    for (uint32_t i = 0; i < 4; ++i) {
      gradients.Select(i);
      (store.Get(kNorm) * 1.0).sum().backward();
    }
    gradients.Finish();
    EXPECT_EQ(store.Get(kNorm).grad()[0].item<float>(), 4);
  }
}

std::map<std::string, double> Norms(const ParameterStore& store, const std::vector<std::string>& frozen = {}) {
  std::vector<UpdateRule> rules;
  for (const TensorSpec& spec : store.specs()) {
    rules.push_back({1, 0, !spec.trainable || std::find(frozen.begin(), frozen.end(), spec.name) != frozen.end()});
  }
  worker::v1::StepReport report;
  AddGradientNorms(store, rules, report);
  std::map<std::string, double> norms;
  for (const auto& norm : report.norms()) EXPECT_TRUE(norms.emplace(norm.name(), norm.squared_norm()).second) << norm.name();
  return norms;
}

TEST(GradientsTest, TheNormOfATensorIsTheSumOfItsSquaresInDoublePrecision) {
  ParameterStore store = Store(TinyConfig(), Whole());
  store.ZeroGradients();
  torch::Tensor gradient = store.PublishedGradient(kNorm);
  torch::NoGradGuard no_grad;
  // 2^24 and 1: in single precision the small squares vanish.
  gradient.fill_(1);
  gradient[0] = 16777216.0;
  const auto norms = Norms(store);
  EXPECT_EQ(norms.at(kNorm), 16777216.0 * 16777216.0 + 31);
  EXPECT_EQ(norms.at(kEmbedding), 0);
  size_t trainable = 0;
  for (const TensorSpec& spec : store.specs()) trainable += spec.trainable;
  EXPECT_EQ(norms.size(), trainable);
}

TEST(GradientsTest, EveryExpertOfAStackHasItsOwnEntry) {
  ParameterStore store = Store(TinyConfig(), Whole());
  store.ZeroGradients();
  torch::NoGradGuard no_grad;
  store.PublishedGradient(kExpert).fill_(2);
  const auto norms = Norms(store);
  EXPECT_EQ(norms.at(kExpert), 4.0 * 16 * 32);
  EXPECT_EQ(norms.at("language_model.model.layers.1.mlp.experts.2.up_proj.weight"), 0);
  EXPECT_THAT(norms, Not(Contains(Key(kExpertStack))));
}

TEST(GradientsTest, FrozenTensorsHaveNoEntry) {
  ParameterStore store = Store(TinyConfig(), Whole());
  store.ZeroGradients();
  EXPECT_THAT(Norms(store, {kNorm}), Not(Contains(Key(kNorm))));
}

TEST(GradientsTest, ATiedEmbeddingCountsAtTheOwnerOfTheEmbeddingAlone) {
  ParameterStore first = Store(TinyTiedConfig(), {.first_layer = 0, .end_layer = 2, .has_embedding = true});
  ParameterStore last = Store(TinyTiedConfig(), {.first_layer = 2, .end_layer = 4, .has_head = true});
  first.ZeroGradients();
  last.ZeroGradients();
  EXPECT_THAT(Norms(first), Contains(Key(kEmbedding)));
  EXPECT_THAT(Norms(last), Not(Contains(Key(kEmbedding))));
}

TEST(GradientsTest, AParameterThatNeedsNoGradientGetsNone) {
  ParameterStore store = Store(TinyConfig(), Whole());
  torch::Tensor frozen = store.Get(kNorm);
  frozen.requires_grad_(false);
  GradientAccumulator gradients(&store, 1);
  gradients.Begin();
  gradients.Finish();
  EXPECT_FALSE(store.Get(kNorm).grad().defined());
  EXPECT_TRUE(store.Get(kEmbedding).grad().defined());
}

TEST(GradientsTest, AWorkerWhosePartIsFrozenHasNothingToAccumulate) {
  ParameterStore store = Store(TinyConfig(), {.has_vision = true});
  for (const Parameter& parameter : store.parameters()) torch::Tensor(parameter.value).requires_grad_(false);
  GradientAccumulator gradients(&store, 2);
  gradients.Begin();
  gradients.Select(1);
  gradients.Finish();
  EXPECT_FALSE(store.parameters().front().value.grad().defined());
}

}  // namespace
}  // namespace moonpipe
