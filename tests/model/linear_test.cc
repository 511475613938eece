#include "moonpipe/model/linear.h"

#include <torch/torch.h>

#include "gtest/gtest.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using torch::Tensor;

class LinearTest : public ::testing::Test {
 protected:
  LinearTest() {
    testing::PinArithmetic();
    torch::manual_seed(3);
    x_ = torch::randn({7, 5}).set_requires_grad(true);
    weight_ = torch::randn({4, 5}).set_requires_grad(true);
    bias_ = torch::randn({4}).set_requires_grad(true);
    upstream_ = torch::randn({7, 4});
  }

  Tensor x_, weight_, bias_, upstream_;
};

TEST_F(LinearTest, OutputAndGradientsAreLibTorchs) {
  const Tensor got = Linear(x_, weight_, bias_);
  got.backward(upstream_);
  std::vector<Tensor> gradients;
  for (Tensor* leaf : {&x_, &weight_, &bias_}) {
    gradients.push_back(leaf->grad().clone());
    leaf->mutable_grad().reset();
  }
  const Tensor want = at::linear(x_, weight_, bias_);
  want.backward(upstream_);
  EXPECT_TRUE(torch::allclose(got, want));
  EXPECT_TRUE(torch::allclose(gradients[0], x_.grad()));
  EXPECT_TRUE(torch::allclose(gradients[1], weight_.grad()));
  EXPECT_TRUE(torch::allclose(gradients[2], bias_.grad()));
}

TEST_F(LinearTest, AGradientThatIsThereIsAddedToWhereItLies) {
  Linear(x_, weight_).backward(upstream_);
  const Tensor once = weight_.grad().clone();
  const void* const where = weight_.grad().data_ptr();
  Linear(x_, weight_).backward(upstream_);
  EXPECT_EQ(weight_.grad().data_ptr(), where);
  EXPECT_TRUE(torch::allclose(weight_.grad(), once * 2));
}

TEST_F(LinearTest, AMasterWeightUnderBf16GetsItsGradientInFp32) {
  for (int time = 1; time <= 2; ++time) {
    Linear(x_.detach().to(torch::kBFloat16), weight_).backward(upstream_.to(torch::kBFloat16));
    EXPECT_EQ(weight_.grad().scalar_type(), torch::kFloat);
    const Tensor want = at::mm(upstream_.to(torch::kBFloat16).t(), x_.detach().to(torch::kBFloat16)).to(torch::kFloat) * time;
    EXPECT_TRUE(torch::equal(weight_.grad(), want));
  }
}

TEST_F(LinearTest, AFrozenWeightGetsNoGradient) {
  weight_.set_requires_grad(false);
  Linear(x_, weight_, bias_).backward(upstream_);
  EXPECT_FALSE(weight_.grad().defined());
  EXPECT_TRUE(torch::allclose(x_.grad(), at::mm(upstream_, weight_)));
}

TEST_F(LinearTest, RowsOfAnEmbeddingAddTheirGradientsInOrder) {
  const Tensor table = torch::randn({6, 3}).set_requires_grad(true);
  const Tensor ids = torch::tensor({4, 1, 4, 0}, torch::kLong);
  const Tensor upstream = torch::randn({4, 3});
  for (int time = 1; time <= 2; ++time) {
    const Tensor rows = Embedding(table, ids);
    EXPECT_TRUE(torch::equal(rows, table.index_select(0, ids)));
    rows.backward(upstream);
    Tensor want = torch::zeros({6, 3});
    for (int add = 0; add < time; ++add) want.index_add_(0, ids, upstream);
    EXPECT_TRUE(torch::equal(table.grad(), want));
  }
}

}  // namespace
}  // namespace moonpipe
