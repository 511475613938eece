// What keeps experts evenly used: the bias rules, and the sequence-wise auxiliary loss with its gradient.
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "moonpipe/model/router.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using testing::Fixture;
using testing::FixtureCase;
using torch::Tensor;

TEST(BalanceTest, TheSignRuleMovesEveryExpertByTheRate) {
  Tensor bias = torch::zeros({4});
  UpdateCorrection(bias, torch::tensor({8, 4, 0, 4}, torch::kLong), 0.5, BiasRule::kSign);  // mean 4
  EXPECT_TRUE(torch::equal(bias, torch::tensor({-0.5F, 0.0F, 0.5F, 0.0F}))) << bias;
}

TEST(BalanceTest, TheCentredRuleTakesTheMeanMoveAway) {
  Tensor bias = torch::zeros({4});
  UpdateCorrection(bias, torch::tensor({9, 1, 1, 1}, torch::kLong), 0.5, BiasRule::kCentred);  // signs -1, 1, 1, 1 with mean 0.5
  EXPECT_TRUE(torch::equal(bias, torch::tensor({-0.75F, 0.25F, 0.25F, 0.25F}))) << bias;
  Tensor plain = torch::zeros({4});
  UpdateCorrection(plain, torch::tensor({9, 1, 1, 1}, torch::kLong), 0.5, BiasRule::kSign);
  EXPECT_TRUE(torch::equal(plain, torch::tensor({-0.5F, 0.5F, 0.5F, 0.5F}))) << plain;
}

TextConfig Experts(int64_t experts, int64_t choices) {
  TextConfig config;
  config.n_routed_experts = experts;
  config.num_experts_per_tok = choices;
  return config;
}

TEST(BalanceTest, TheLossIsOneWhereAllExpertsAreUsedAlikeAndGrowsWithTheFavouriteExpert) {
  const Tensor alike = torch::tensor({0, 1, 2, 3}, torch::kLong).view({2, 2});
  EXPECT_NEAR(BalanceLoss(Experts(4, 2), torch::zeros({2, 4}), alike, {2}).item<double>(), 1, 1e-6);
  const Tensor favourites = torch::tensor({0, 1, 0, 1}, torch::kLong).view({2, 2});
  Tensor logits = torch::full({2, 4}, -20.0);
  logits.narrow(1, 0, 2).fill_(20);
  EXPECT_NEAR(BalanceLoss(Experts(4, 2), logits, favourites, {2}).item<double>(), 2, 1e-5);
}

TEST(BalanceTest, DocumentsAreBalancedEachByItself) {
  // One document that alternates is balanced; two documents of one token each are not, though their sum is.
  const Tensor indices = torch::tensor({0, 1}, torch::kLong).view({2, 1});
  Tensor logits = torch::tensor({20.0F, -20.0F, -20.0F, 20.0F}).view({2, 2});
  EXPECT_NEAR(BalanceLoss(Experts(2, 1), logits, indices, {2}).item<double>(), 1, 1e-5);
  EXPECT_NEAR(BalanceLoss(Experts(2, 1), logits, indices, {1, 1}).item<double>(), 4, 1e-5);
}

// The formula in plain loops and doubles; its gradient by central differences.
double LossByHand(const Tensor& logits, const Tensor& indices, const std::vector<int64_t>& lengths) {
  const int64_t experts = logits.size(1), choices = indices.size(1);
  double sum = 0;
  int64_t first = 0;
  for (const int64_t length : lengths) {
    for (int64_t e = 0; e < experts; ++e) {
      double chosen = 0, share = 0;
      for (int64_t t = first; t < first + length; ++t) {
        for (int64_t k = 0; k < choices; ++k) chosen += indices[t][k].item<int64_t>() == e;
        double total = 0;
        for (int64_t j = 0; j < experts; ++j) total += 1 / (1 + std::exp(-logits[t][j].item<double>()));
        share += 1 / (1 + std::exp(-logits[t][e].item<double>())) / total;
      }
      sum += static_cast<double>(experts) / static_cast<double>(choices * length) * chosen * share / static_cast<double>(length);
    }
    first += length;
  }
  return sum;
}

TEST(BalanceTest, LossAndGradientAgreeWithTheFormulaByHand) {
  torch::Generator generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const Tensor logits = torch::empty({5, 4}, torch::kDouble).normal_(0, 1, generator);
  const Tensor indices = std::get<1>(logits.topk(2));
  Tensor leaf = logits.to(torch::kFloat).requires_grad_(true);
  const Tensor loss = BalanceLoss(Experts(4, 2), leaf, indices, {3, 2});
  EXPECT_NEAR(loss.item<double>(), LossByHand(logits, indices, {3, 2}), 1e-6);
  loss.backward();
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t e = 0; e < 4; ++e) {
      Tensor up = logits.clone(), down = logits.clone();
      up[t][e] += 1e-5;
      down[t][e] -= 1e-5;
      const double slope = (LossByHand(up, indices, {3, 2}) - LossByHand(down, indices, {3, 2})) / 2e-5;
      EXPECT_NEAR(leaf.grad()[t][e].item<double>(), slope, 1e-6) << t << " " << e;
    }
  }
}

TEST(BalanceTest, InTheModelItMovesRoutersAndLeavesTheOutputAlone) {
  testing::PinArithmetic();
  const Fixture fixture("moonlight");
  const FixtureCase input = fixture.Case("packed");
  Tensor outputs[2], gradients[2];
  for (const int with : {0, 1}) {
    ParameterStore store = fixture.Load();
    store.ZeroGradients();
    DecoderPart decoder(store);
    DecoderInput in{input.ids_T, input.document_lengths, {}};
    in.balance_scale = with * 0.1;
    const DecoderOutput out = decoder.Forward(in);
    outputs[with] = out.hidden_or_logits.detach();
    for (const ExpertLoad& load : out.loads) EXPECT_EQ(load.balance_loss.defined(), with == 1);
    (out.hidden_or_logits.sum() * 0).backward();  // the model's own loss trains nothing
    gradients[with] = store.PublishedGradient("model.layers.1.mlp.gate.weight").clone();
  }
  EXPECT_TRUE(torch::equal(outputs[0], outputs[1]));
  EXPECT_EQ(gradients[0].abs().max().item<float>(), 0);
  EXPECT_GT(gradients[1].abs().max().item<float>(), 0);
}

}  // namespace
}  // namespace moonpipe
