#include "moonpipe/model/grouped_feed_forward.h"

#include <torch/torch.h>

#include <limits>

#include "gtest/gtest.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using torch::Tensor;

// 5 experts, the second and the last idle.
const std::vector<int64_t> kOffsets = {0, 4, 4, 30, 33, 33};
constexpr int64_t kRows = 33, kHidden = 6, kInner = 10;

class GroupedFeedForwardTest : public ::testing::Test {
 protected:
  GroupedFeedForwardTest() {
    testing::PinArithmetic();
    torch::manual_seed(3);
    x_ = torch::randn({kRows, kHidden}).set_requires_grad(true);
    weights_ = {torch::randn({5, kInner, kHidden}), torch::randn({5, kInner, kHidden}), torch::randn({5, kHidden, kInner})};
    for (Tensor& weight : weights_) weight.set_requires_grad(true);
    upstream_ = torch::randn({kRows, kHidden});
  }

  Tensor Run() { return GroupedFeedForward(x_, weights_[0], weights_[1], weights_[2], kOffsets); }

  // Output and gradients of x, gate, up, down in double, expert by expert.
  std::vector<Tensor> Exact() {
    std::vector<Tensor> leaves = {x_.detach().to(torch::kDouble).set_requires_grad(true)};
    for (const Tensor& weight : weights_) leaves.push_back(weight.detach().to(torch::kDouble).set_requires_grad(true));
    std::vector<Tensor> outputs;
    for (int64_t e = 0; e < 5; ++e) {
      const auto i = static_cast<size_t>(e);
      const Tensor x = leaves[0].narrow(0, kOffsets[i], kOffsets[i + 1] - kOffsets[i]);
      outputs.push_back(at::linear(at::silu(at::linear(x, leaves[1][e])) * at::linear(x, leaves[2][e]), leaves[3][e]));
    }
    const Tensor y = torch::cat(outputs);
    y.backward(upstream_.to(torch::kDouble));
    return {y.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad(), leaves[3].grad()};
  }

  Tensor x_, upstream_;
  std::vector<Tensor> weights_;
};

bool Close(const Tensor& got, const Tensor& want) { return torch::allclose(got.to(torch::kDouble), want, 1e-5, 1e-5); }

TEST_F(GroupedFeedForwardTest, OutputsAndGradientsAreThoseOfEachExpertAlone) {
  // Bytes that the allocator hands out again must reach nothing.
  for (int64_t size : {kRows * kHidden, kRows * kInner, 5 * kInner * kHidden}) torch::full({size}, std::numeric_limits<float>::quiet_NaN());
  const Tensor y = Run();
  y.backward(upstream_);
  const std::vector<Tensor> want = Exact();
  EXPECT_TRUE(Close(y, want[0]));
  EXPECT_TRUE(Close(x_.grad(), want[1]));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(Close(weights_[i].grad(), want[i + 2])) << i;
    EXPECT_TRUE(torch::equal(weights_[i].grad()[1], torch::zeros_like(weights_[i][1])));
    EXPECT_TRUE(torch::equal(weights_[i].grad()[4], torch::zeros_like(weights_[i][4])));
  }
}

TEST_F(GroupedFeedForwardTest, GradientsThatAreThereAreAddedToWhereTheyLie) {
  std::vector<void*> where;
  for (Tensor& weight : weights_) {
    weight.mutable_grad() = torch::full_like(weight, 2);
    where.push_back(weight.grad().data_ptr());
  }
  Run().backward(upstream_);
  const std::vector<Tensor> want = Exact();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(weights_[i].grad().data_ptr(), where[i]);
    EXPECT_TRUE(Close(weights_[i].grad(), want[i + 2] + 2)) << i;
  }
}

TEST_F(GroupedFeedForwardTest, WhatIsFrozenGetsNoGradientAndChangesNoOther) {
  Run().backward(upstream_);
  const Tensor dx = x_.grad().clone(), ddown = weights_[2].grad().clone();
  x_.mutable_grad().reset();
  weights_[2].mutable_grad().reset();
  for (size_t i : {0, 1}) {
    weights_[i].mutable_grad().reset();
    weights_[i].set_requires_grad(false);
  }
  Run().backward(upstream_);
  EXPECT_FALSE(weights_[0].grad().defined());
  EXPECT_TRUE(torch::equal(x_.grad(), dx));
  EXPECT_TRUE(torch::equal(weights_[2].grad(), ddown));
}

TEST_F(GroupedFeedForwardTest, TheBitsOfAnExpertDependOnItsRowsAlone) {
  const Tensor all = Run();
  const Tensor alone = GroupedFeedForward(x_.narrow(0, 4, 26), weights_[0], weights_[1], weights_[2], {0, 0, 0, 26, 26, 26});
  EXPECT_TRUE(torch::equal(all.narrow(0, 4, 26), alone));
}

TEST_F(GroupedFeedForwardTest, OffsetsThatDoNotFitAreRefused) {
  EXPECT_THROW(GroupedFeedForward(x_, weights_[0], weights_[1], weights_[2], {0, 33}), c10::Error);
  EXPECT_THROW(GroupedFeedForward(x_, weights_[0], weights_[1], weights_[2], {0, 4, 4, 30, 33, 32}), c10::Error);
}

}  // namespace
}  // namespace moonpipe
