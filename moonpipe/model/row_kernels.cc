// This unit is compiled for vector units (CMakeLists.txt beside it); the pragmas let the compiler use them.
#include "moonpipe/model/row_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace moonpipe::rows {
namespace {

constexpr float kLog2E = 1.44269504f;
// ln 2 in two parts, the first exact in few bits, so that n * kLn2High is exact.
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -2.12194440e-4f;
constexpr float kLeast = -87.33654f;  // exp of it is the least normal number
constexpr float kMost = 88.37626f;
// Adding and taking away 1.5 * 2^23 rounds to an integer.
constexpr float kRounder = 12582912.0f;
constexpr float kGeluScale = 0.7978845608f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

inline float ExpOf(float x) {
  const float bounded = std::min(std::max(x, kLeast), kMost);
  const float n = (bounded * kLog2E + kRounder) - kRounder;
  float r = bounded - n * kLn2High;
  r = r - n * kLn2Low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const float power = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return x < kLeast ? 0.0f : p * power;
}

inline float SigmoidOf(float x) { return 1.0f / (1.0f + ExpOf(-x)); }

}  // namespace

void Exp(const float* x, int64_t n, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = ExpOf(x[i]);
}

float ExpOfRow(float* x, int64_t n, float scale, float* largest) {
  float most = x[0];
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) most = std::max(most, x[i]);
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const float value = ExpOf(scale * (x[i] - most));
    x[i] = value;
    sum += value;
  }
  *largest = most;
  return sum;
}

void ExpShifted(float* x, int64_t n, float scale, float shift) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] = ExpOf(scale * x[i] - shift);
}

void SoftmaxGradient(const float* p, float* dp, int64_t n, float scale, float inner) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dp[i] = scale * p[i] * (dp[i] - inner);
}

float Dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void SwiGlu(const float* gate, const float* up, int64_t n, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = gate[i] * SigmoidOf(gate[i]) * up[i];
}

void SwiGluGradient(const float* gate, const float* up, const float* dy, int64_t n, float* dgate, float* dup) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float sigmoid = SigmoidOf(gate[i]);
    const float silu = gate[i] * sigmoid;
    dup[i] = dy[i] * silu;
    dgate[i] = dy[i] * up[i] * (sigmoid + silu * (1.0f - sigmoid));
  }
}

// (1 + tanh(z)) / 2 is the sigmoid of 2z.
void GeluTanh(const float* x, int64_t n, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float z = 2.0f * kGeluScale * (x[i] + kGeluCubic * x[i] * x[i] * x[i]);
    y[i] = x[i] * SigmoidOf(z);
  }
}

void GeluTanhGradient(const float* x, const float* dy, int64_t n, float* dx) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float square = x[i] * x[i];
    const float sigmoid = SigmoidOf(2.0f * kGeluScale * (x[i] + kGeluCubic * square * x[i]));
    const float slope = 2.0f * kGeluScale * (1.0f + 3.0f * kGeluCubic * square);
    dx[i] = dy[i] * (sigmoid + x[i] * slope * sigmoid * (1.0f - sigmoid));
  }
}

void RotatePairs(const float* x, const float* cos, const float* sin, int64_t n, float sin_sign, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; i += 2) {
    const float first = x[i], second = x[i + 1];
    y[i] = first * cos[i] + sin_sign * (second * sin[i]);
    y[i + 1] = second * cos[i + 1] + sin_sign * (first * sin[i + 1]);
  }
}

float RmsNorm(const float* x, const float* weight, int64_t n, float eps, float* y) {
  const float inverse = 1.0f / std::sqrt(Dot(x, x, n) / static_cast<float>(n) + eps);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * inverse * weight[i];
  return inverse;
}

// With m = x * r and g = dy * weight: dx = r * (g - m * mean(g * m)).
void RmsNormGradient(const float* x, const float* weight, const float* dy, int64_t n, float inverse_rms, float* dx, float* dweight) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const float normed = x[i] * inverse_rms;
    sum += dy[i] * weight[i] * normed;
    dweight[i] += dy[i] * normed;
  }
  const float mean = sum / static_cast<float>(n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dx[i] = inverse_rms * (dy[i] * weight[i] - x[i] * inverse_rms * mean);
}

}  // namespace moonpipe::rows
