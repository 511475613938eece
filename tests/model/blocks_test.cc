// The parts of the model one by one, against values worked out by hand and against each other.
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/model/experts.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/model/linear.h"
#include "moonpipe/model/loss.h"
#include "moonpipe/model/media_scatter.h"
#include "moonpipe/model/norms.h"
#include "moonpipe/model/position_table.h"
#include "moonpipe/model/router.h"
#include "moonpipe/model/span_attention.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class BlocksTest : public ::testing::Test {
 protected:
  BlocksTest() {
    testing::PinArithmetic();
    torch::manual_seed(7);
  }
};

std::string ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// A 4 x 4 table of one channel with 10 * row + column, resized.
Tensor ResizedTable(int64_t rows, int64_t cols) {
  const Tensor table = (10 * torch::arange(4, torch::kFloat).view({4, 1}) + torch::arange(4, torch::kFloat)).unsqueeze(-1);
  return InterpolatePositions(table, CubicWeights(rows, 4), CubicWeights(cols, 4)).view({rows, cols});
}

void ExpectClose(const Tensor& got, const std::vector<double>& want) {
  const Tensor difference = (got.flatten().to(torch::kDouble) - torch::tensor(want, torch::kDouble)).abs();
  EXPECT_LT(difference.max().item<double>(), 1e-4) << got;
}

TEST_F(BlocksTest, ThePositionTableIsReturnedUnchangedForItsOwnGrid) {
  EXPECT_TRUE(torch::equal(ResizedTable(4, 4), 10 * torch::arange(4, torch::kFloat).view({4, 1}) + torch::arange(4, torch::kFloat)));
  EXPECT_TRUE(torch::equal(CubicWeights(5, 5), torch::eye(5)));
}

TEST_F(BlocksTest, ThePositionTableIsResizedToGridsThatAreNotSquare) {
  ExpectClose(ResizedTable(2, 4), {4.0625, 5.0625, 6.0625, 7.0625, 25.9375, 26.9375, 27.9375, 28.9375});
  ExpectClose(ResizedTable(4, 2), {0.4062, 2.5938, 10.4062, 12.5938, 20.4062, 22.5938, 30.4062, 32.5938});
  ExpectClose(ResizedTable(2, 6)[0], {3.9757, 4.4688, 5.2755, 5.8495, 6.6562, 7.1493});
  ExpectClose(ResizedTable(6, 2)[0], {-0.4618, 1.7257});
  ExpectClose(ResizedTable(6, 2)[5], {31.2743, 33.4618});
}

TextConfig RouterConfig(int64_t experts, int64_t choices) {
  TextConfig config;
  config.n_routed_experts = experts;
  config.num_experts_per_tok = choices;
  return config;
}

TEST_F(BlocksTest, TheCorrectionChoosesExpertsButDoesNotWeighThem) {
  TextConfig config = RouterConfig(4, 2);
  config.routed_scaling_factor = 2.446;
  const Routing routing = Route(config, torch::tensor({{2.197225, 0.405465, 0.0, -1.386294}}).to(torch::kFloat),
                                torch::tensor({-0.5, 0.0, 0.0, 0.45}).to(torch::kFloat));
  EXPECT_TRUE(torch::equal(routing.indices_TK, torch::tensor({{1, 3}}, torch::kLong))) << routing.indices_TK;
  ExpectClose(routing.weights_TK, {1.8345, 0.6115});
}

TEST_F(BlocksTest, ExpertsOutsideTheKeptGroupsAreNeverChosenEvenIfTheOthersAreNegative) {
  TextConfig config = RouterConfig(4, 2);
  config.n_group = 2;
  config.topk_group = 1;
  const Tensor logits = torch::logit(torch::tensor({{0.6, 0.5, 0.3, 0.2}})).to(torch::kFloat);
  const Routing routing = Route(config, logits, torch::full({4}, -1.0f));
  EXPECT_TRUE(torch::equal(routing.indices_TK, torch::tensor({{0, 1}}, torch::kLong))) << routing.indices_TK;
  ExpectClose(routing.weights_TK, {0.545455, 0.454545});
}

TEST_F(BlocksTest, TheCorrectionMovesAgainstTheLoadByTheRate) {
  Tensor correction = torch::zeros({4});
  UpdateCorrection(correction, torch::tensor({5, 3, 4, 4}, torch::kLong), 0.001);
  EXPECT_TRUE(torch::allclose(correction, torch::tensor({-0.001, 0.001, 0.0, 0.0}).to(torch::kFloat), 0, 1e-9)) << correction;
}

TEST_F(BlocksTest, RowsAreSortedByExpertAndWithinAnExpertByToken) {
  const ExpertPlan plan = PlanExperts(torch::tensor({{0, 2}, {1, 2}, {0, 2}}, torch::kLong), 4);
  EXPECT_THAT(plan.offsets, ::testing::ElementsAre(0, 2, 3, 6, 6));
  EXPECT_TRUE(torch::equal(plan.token_of_row, torch::tensor({0, 2, 1, 0, 1, 2}, torch::kLong)));
  EXPECT_TRUE(torch::equal(plan.row_of_choice, torch::tensor({0, 3, 2, 4, 1, 5}, torch::kLong)));
  EXPECT_TRUE(torch::equal(plan.choice_of_row.index_select(0, plan.row_of_choice), torch::arange(6)));
}

TEST_F(BlocksTest, GroupedLinearEqualsALoopOverExpertsAndLeavesIdleOnesExactlyZero) {
  const Tensor x = torch::randn({6, 5}).set_requires_grad(true);
  const Tensor weight = torch::randn({4, 3, 5}).set_requires_grad(true);
  const std::vector<int64_t> offsets = {0, 2, 2, 6, 6};
  // Bytes that the allocator hands out again must reach nothing.
  for (int64_t size : {6 * 3, 6 * 5, 4 * 3 * 5}) torch::full({size}, std::numeric_limits<float>::quiet_NaN());
  const Tensor upstream = torch::randn({6, 3});
  GroupedLinear(x, weight, offsets).backward(upstream);
  const Tensor dx = x.grad().clone();
  const Tensor dweight = weight.grad().clone();
  x.mutable_grad().reset();
  weight.mutable_grad().reset();
  torch::cat({at::linear(x.narrow(0, 0, 2), weight[0]), at::linear(x.narrow(0, 2, 4), weight[2])}).backward(upstream);
  EXPECT_TRUE(torch::allclose(dx, x.grad()));
  EXPECT_TRUE(torch::allclose(dweight, weight.grad()));
  EXPECT_TRUE(torch::equal(dweight[1], torch::zeros({3, 5})));
  EXPECT_TRUE(torch::equal(dweight[3], torch::zeros({3, 5})));
}

TEST_F(BlocksTest, RmsNormHasTheGradientOfItsFormula) {
  const Tensor x = torch::randn({5, 8}).set_requires_grad(true);
  const Tensor weight = torch::randn({8}).set_requires_grad(true);
  const Tensor upstream = torch::randn({5, 8});
  const Tensor got = RmsNorm(x, weight, 1e-5);
  got.backward(upstream);
  const Tensor dx = x.grad().clone();
  const Tensor dweight = weight.grad().clone();
  x.mutable_grad().reset();
  weight.mutable_grad().reset();
  const Tensor want = x * torch::rsqrt(x.square().mean(-1, true) + 1e-5) * weight;
  want.backward(upstream);
  EXPECT_TRUE(torch::allclose(got, want, 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(dx, x.grad(), 1e-4, 1e-6));
  EXPECT_TRUE(torch::allclose(dweight, weight.grad(), 1e-4, 1e-6));
}

// Forward and gradients of q, k, v for spans in company.
std::vector<Tensor> Attend(const Tensor& qkv, const std::vector<int64_t>& lengths, bool causal) {
  const Tensor leaf = qkv.clone().set_requires_grad(true);
  const SpanLayout layout(lengths, torch::kCPU);
  const Tensor out = SpanAttention(leaf.select(1, 0), leaf.select(1, 1), leaf.select(1, 2), layout, causal, 0.25);
  out.backward(torch::sin(out.detach() * 3));
  return {out.detach(), leaf.grad()};
}

TEST_F(BlocksTest, ASpanHasTheSameBitsInAnyCompany) {
  for (const bool causal : {true, false}) {
    const std::vector<int64_t> lengths = {7, 40, 7, 1, 40, 300, 7};
    const Tensor qkv = torch::randn({402, 3, 4, 24});
    const std::vector<Tensor> packed = Attend(qkv, lengths, causal);
    int64_t first = 0;
    for (const int64_t length : lengths) {
      const std::vector<Tensor> alone = Attend(qkv.narrow(0, first, length), {length}, causal);
      EXPECT_TRUE(torch::equal(packed[0].narrow(0, first, length), alone[0])) << length;
      EXPECT_TRUE(torch::equal(packed[1].narrow(0, first, length), alone[1])) << length;
      first += length;
    }
  }
}

TEST_F(BlocksTest, CausalAttentionEqualsTheMaskedFormula) {
  const Tensor qkv = torch::randn({9, 3, 2, 8});
  const Tensor got = Attend(qkv, {9}, true)[0];
  const Tensor q = qkv.select(1, 0).transpose(0, 1);
  const Tensor k = qkv.select(1, 1).transpose(0, 1);
  const Tensor v = qkv.select(1, 2).transpose(0, 1);
  const Tensor hidden = torch::ones({9, 9}, torch::kBool).triu(1);
  const Tensor scores = (at::matmul(q, k.transpose(1, 2)) * 0.25).masked_fill(hidden, -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(torch::allclose(got, at::matmul(scores.softmax(-1), v).transpose(0, 1), 1e-5, 1e-6));
}

TEST_F(BlocksTest, TheLossInBlocksOfRowsIsLibTorchsOfAllLogits) {
  const int64_t tokens = 2 * kLossRows + 100, hidden = 8, vocabulary = 11;
  Tensor labels = torch::randint(0, vocabulary, {tokens}, torch::kLong);
  labels.slice(0, 3, 50).fill_(kIgnoredLabel);  // three blocks of trained rows are left, the last one short
  const Tensor x = torch::randn({tokens, hidden}), head = torch::randn({vocabulary, hidden});
  Tensor whole_x = x.clone().requires_grad_(true), whole_head = head.clone().requires_grad_(true);
  const Tensor want = at::cross_entropy_loss(Linear(whole_x, whole_head), labels, {}, at::Reduction::Sum, kIgnoredLabel);
  (want / 7).backward();
  Tensor block_x = x.clone().requires_grad_(true), block_head = head.clone().requires_grad_(true);
  const Loss loss = HeadCrossEntropy(block_x, block_head, labels);
  (loss.sum / 7).backward();
  EXPECT_TRUE(torch::allclose(loss.sum, want, 1e-5, 0));
  EXPECT_TRUE(torch::allclose(loss.nll_T, at::cross_entropy_loss(Linear(x, head), labels, {}, at::Reduction::None, kIgnoredLabel), 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(block_x.grad(), whole_x.grad(), 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(block_head.grad(), whole_head.grad(), 1e-4, 1e-5));
  EXPECT_THAT(ErrorOf([&] { HeadCrossEntropy(x.slice(0, 0, 5), head, torch::tensor({0, 1, 2, 3, 11}, torch::kLong)); }), HasSubstr("below 11; 1 of 5"));
}

TEST_F(BlocksTest, WithoutTrainedLabelsLossAndGradientsAreExactlyZero) {
  const Tensor x = torch::randn({4, 8}).set_requires_grad(true), head = torch::randn({11, 8}).set_requires_grad(true);
  const Loss loss = HeadCrossEntropy(x, head, torch::full({4}, kIgnoredLabel, torch::kLong));
  loss.sum.backward();
  EXPECT_EQ(loss.sum.item<float>(), 0);
  EXPECT_TRUE(torch::equal(x.grad(), torch::zeros({4, 8})));
  EXPECT_TRUE(torch::equal(head.grad(), torch::zeros({11, 8})));
}

TEST_F(BlocksTest, FeatureRowsMustEqualPlaceholders) {
  const Tensor embeddings = torch::zeros({5, 2});
  const Tensor positions = MediaPositions(torch::tensor({9, 5, 5, 9, 5}, torch::kLong), 5);
  EXPECT_TRUE(torch::equal(positions, torch::tensor({1, 2, 4}, torch::kLong)));
  EXPECT_THAT(ErrorOf([&] { ScatterMedia(embeddings, positions, torch::ones({2, 2})); }), HasSubstr("2 feature rows, but the tokens have 3"));
  EXPECT_THAT(ErrorOf([&] { ScatterMedia(embeddings, positions, {}); }), HasSubstr("0 feature rows, but the tokens have 3"));
  EXPECT_TRUE(torch::equal(ScatterMedia(embeddings, positions, torch::ones({3, 2})).select(1, 0), torch::tensor({0, 1, 1, 0, 1}).to(torch::kFloat)));
}

}  // namespace
}  // namespace moonpipe
