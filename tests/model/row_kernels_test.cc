// Loops over rows against the same formulas in double.
#include "moonpipe/model/row_kernels.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

// Not a multiple of a vector, so that a remainder is left.
constexpr int64_t kLength = 1003;

std::vector<float> Draw(uint32_t seed, float from, float to) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(from, to);
  std::vector<float> x(kLength);
  std::generate(x.begin(), x.end(), [&] { return uniform(generator); });
  return x;
}

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double Gelu(double x) { return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

// Within `relative` of the largest of what is wanted, or 1.
void ExpectClose(const std::vector<float>& got, const std::function<double(size_t)>& want, double relative) {
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want(i), relative * std::max(1.0, std::abs(want(i)))) << i;
}

TEST(RowKernelsTest, ExponentialsAreWithinTwoUnitsInTheLastPlace) {
  std::vector<float> y(kLength);
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const std::vector<float> x = Draw(seed, -87, 88);
    rows::Exp(x.data(), kLength, y.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = std::exp(static_cast<double>(x[i]));
      const float unit = std::nextafter(static_cast<float>(want), std::numeric_limits<float>::infinity()) - static_cast<float>(want);
      ASSERT_NEAR(y[i], want, 2 * unit) << x[i];
    }
  }
}

TEST(RowKernelsTest, ExponentialsOfTheEndsOfTheRange) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {0, -88, -1e30f, -infinity, std::numeric_limits<float>::quiet_NaN()};
  std::vector<float> y(x.size());
  rows::Exp(x.data(), static_cast<int64_t>(x.size()), y.data());
  EXPECT_EQ(y[0], 1);
  EXPECT_EQ(y[1], 0);
  EXPECT_EQ(y[2], 0);
  EXPECT_EQ(y[3], 0);
  EXPECT_TRUE(std::isnan(y[4]));
}

TEST(RowKernelsTest, ASoftmaxAndItsGradient) {
  const std::vector<float> logits = Draw(1, -30, 30), dp = Draw(2, -2, 2);
  const double scale = 0.3;
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(scale * (x - most));
  std::vector<float> p = logits;
  float largest = 0;
  EXPECT_NEAR(rows::ExpOfRow(p.data(), kLength, static_cast<float>(scale), &largest) / sum, 1, 1e-6);
  EXPECT_EQ(largest, most);
  ExpectClose(p, [&](size_t i) { return std::exp(scale * (logits[i] - most)); }, 1e-6);
  const double log_sum = scale * most + std::log(sum);
  p = logits;
  rows::ExpShifted(p.data(), kLength, static_cast<float>(scale), static_cast<float>(log_sum));
  ExpectClose(p, [&](size_t i) { return std::exp(scale * logits[i] - log_sum); }, 2e-6);
  double inner = 0;
  for (size_t i = 0; i < p.size(); ++i) inner += static_cast<double>(p[i]) * dp[i];
  EXPECT_NEAR(rows::Dot(p.data(), dp.data(), kLength), inner, 1e-6);
  std::vector<float> dlogits = dp;
  rows::SoftmaxGradient(p.data(), dlogits.data(), kLength, static_cast<float>(scale), static_cast<float>(inner));
  ExpectClose(dlogits, [&](size_t i) { return scale * p[i] * (dp[i] - inner); }, 1e-6);
}

TEST(RowKernelsTest, SwiGluAndItsGradient) {
  const std::vector<float> gate = Draw(1, -20, 20), up = Draw(2, -3, 3), dy = Draw(3, -2, 2);
  std::vector<float> y(kLength), dgate(kLength), dup(kLength);
  rows::SwiGlu(gate.data(), up.data(), kLength, y.data());
  rows::SwiGluGradient(gate.data(), up.data(), dy.data(), kLength, dgate.data(), dup.data());
  ExpectClose(y, [&](size_t i) { return gate[i] * Sigmoid(gate[i]) * up[i]; }, 1e-6);
  ExpectClose(dup, [&](size_t i) { return dy[i] * gate[i] * Sigmoid(gate[i]); }, 1e-6);
  ExpectClose(dgate, [&](size_t i) {
    const double s = Sigmoid(gate[i]);
    return dy[i] * up[i] * (s + gate[i] * s * (1 - s));
  }, 1e-6);
}

TEST(RowKernelsTest, GeluAndItsGradient) {
  const std::vector<float> x = Draw(1, -8, 8), dy = Draw(2, -2, 2);
  std::vector<float> y(kLength), dx(kLength);
  rows::GeluTanh(x.data(), kLength, y.data());
  rows::GeluTanhGradient(x.data(), dy.data(), kLength, dx.data());
  ExpectClose(y, [&](size_t i) { return Gelu(x[i]); }, 1e-6);
  ExpectClose(dx, [&](size_t i) { return dy[i] * (Gelu(x[i] + 1e-4) - Gelu(x[i] - 1e-4)) / 2e-4; }, 2e-6);
}

TEST(RowKernelsTest, PairsAreRotatedAndBack) {
  const std::vector<float> x = Draw(1, -2, 2), angle = Draw(2, -3, 3);
  const int64_t n = kLength - 1;
  std::vector<float> cos(kLength), sin(kLength), y(kLength), back(kLength);
  for (size_t i = 0; i + 1 < cos.size(); i += 2) {
    cos[i] = cos[i + 1] = std::cos(angle[i]);
    sin[i] = -std::sin(angle[i]);
    sin[i + 1] = std::sin(angle[i]);
  }
  rows::RotatePairs(x.data(), cos.data(), sin.data(), n, 1, y.data());
  rows::RotatePairs(y.data(), cos.data(), sin.data(), n, -1, back.data());
  for (size_t i = 0; i + 1 < x.size(); i += 2) {
    ASSERT_NEAR(y[i], x[i] * std::cos(angle[i]) - x[i + 1] * std::sin(angle[i]), 1e-6);
    ASSERT_NEAR(y[i + 1], x[i] * std::sin(angle[i]) + x[i + 1] * std::cos(angle[i]), 1e-6);
    ASSERT_NEAR(back[i], x[i], 1e-6);
  }
}

}  // namespace
}  // namespace moonpipe
