// Attention in blocks against the explicit formula in double.
#include "moonpipe/model/blocked_attention.h"

#include <torch/torch.h>

#include <limits>

#include "gtest/gtest.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using torch::Tensor;

constexpr double kScale = 0.3;

class BlockedAttentionTest : public ::testing::Test {
 protected:
  BlockedAttentionTest() {
    testing::PinArithmetic();
    torch::manual_seed(3);
  }
};

Tensor Explicit(const Tensor& q_TNd, const Tensor& k_TNd, const Tensor& v_TNv, const std::vector<int64_t>& lengths, bool causal) {
  std::vector<Tensor> spans;
  int64_t first = 0;
  for (const int64_t length : lengths) {
    const auto part = [&](const Tensor& x) { return x.narrow(0, first, length).transpose(0, 1); };
    Tensor scores = at::matmul(part(q_TNd), part(k_TNd).transpose(1, 2)) * kScale;
    if (causal) scores = scores.masked_fill(torch::ones({length, length}, torch::kBool).triu(1), -std::numeric_limits<double>::infinity());
    spans.push_back(at::matmul(scores.softmax(-1), part(v_TNv)).transpose(0, 1));
    first += length;
  }
  return torch::cat(spans);
}

double Largest(const Tensor& difference) { return difference.abs().max().item<double>(); }

TEST_F(BlockedAttentionTest, OutputsAndGradientsAreThoseOfTheFormula) {
  // Shorter than a block, one block, a block and a row, several.
  const std::vector<int64_t> lengths = {1, 5, kQueryBlock, kQueryBlock + 1, 3 * kQueryBlock - 7};
  int64_t rows = 0;
  for (const int64_t length : lengths) rows += length;
  for (const bool causal : {true, false}) {
    for (const int64_t value_width : {8, 12}) {
      std::vector<Tensor> inputs = {torch::randn({rows, 3, 12}), torch::randn({rows, 3, 12}), torch::randn({rows, 3, value_width})};
      const Tensor upstream = torch::randn({rows, 3, value_width});
      std::vector<Tensor> exact;
      for (Tensor& x : inputs) {
        exact.push_back(x.to(torch::kDouble).set_requires_grad(true));
        x.set_requires_grad(true);
      }
      const Tensor got = BlockedAttention(inputs[0], inputs[1], inputs[2], lengths, causal, kScale);
      const Tensor want = Explicit(exact[0], exact[1], exact[2], lengths, causal);
      got.backward(upstream);
      want.backward(upstream.to(torch::kDouble));
      EXPECT_LT(Largest(got - want), 3e-6);
      for (size_t i = 0; i < inputs.size(); ++i) EXPECT_LT(Largest(inputs[i].grad() - exact[i].grad()), 1e-5) << "input " << i;
    }
  }
}

TEST_F(BlockedAttentionTest, RowsMayLieApartAndTransposed) {
  const std::vector<int64_t> lengths = {20, 200};
  const Tensor fused_TXd = torch::randn({220, 9, 12});
  const Tensor columns_TNd = torch::randn({220, 12, 3}).transpose(1, 2);
  const Tensor got = BlockedAttention(fused_TXd.narrow(1, 0, 3), columns_TNd, fused_TXd.narrow(1, 6, 3), lengths, true, kScale);
  const Tensor want = BlockedAttention(fused_TXd.narrow(1, 0, 3).contiguous(), columns_TNd.contiguous(), fused_TXd.narrow(1, 6, 3).contiguous(),
                                       lengths, true, kScale);
  EXPECT_TRUE(torch::equal(got, want));
}

TEST_F(BlockedAttentionTest, LargeLogitsStayFiniteAndNanStaysInItsSpan) {
  Tensor qkv = torch::randn({30, 3, 2, 8});
  EXPECT_TRUE(torch::isfinite(BlockedAttention(qkv.select(1, 0) * 1e4, qkv.select(1, 1) * 1e4, qkv.select(1, 2), {30}, true, 1)).all().item<bool>());
  qkv[3] = std::numeric_limits<float>::quiet_NaN();
  const Tensor out = BlockedAttention(qkv.select(1, 0), qkv.select(1, 1), qkv.select(1, 2), {10, 20}, false, kScale);
  EXPECT_TRUE(torch::isnan(out.narrow(0, 0, 10)).all().item<bool>());
  EXPECT_TRUE(torch::isfinite(out.narrow(0, 10, 20)).all().item<bool>());
}

TEST_F(BlockedAttentionTest, NoRowsGiveNoRows) {
  EXPECT_EQ(BlockedAttention(torch::empty({0, 2, 8}), torch::empty({0, 2, 8}), torch::empty({0, 2, 4}), {}, true, 1).sizes(),
            (std::vector<int64_t>{0, 2, 4}));
}

}  // namespace
}  // namespace moonpipe
