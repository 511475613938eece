// Arithmetic over rows of fp32 numbers on the host that the library does in several passes or with slow functions: one pass each here.
// No torch, no threads: callers give each thread rows of its own. The same bits for a row wherever it lies.
//
// Exponentials are a polynomial after a reduction to [-ln 2 / 2, ln 2 / 2]: within 2 units in the last place for what does not under- or
// overflow, exactly 0 below -87.3.
#pragma once

#include <cstdint>

namespace moonpipe::rows {

// exp(x) for n numbers, for testing.
void Exp(const float* x, int64_t n, float* y);

// x becomes exp(scale * (x - largest x)), for scale > 0 and n > 0. Returns the sum of the results and gives `largest`.
float ExpOfRow(float* x, int64_t n, float scale, float* largest);
// x becomes exp(scale * x - shift).
void ExpShifted(float* x, int64_t n, float scale, float shift);
// The gradient of a softmax of scaled logits: dp becomes scale * p * (dp - inner), where `inner` is the sum of p * dp over the row.
void SoftmaxGradient(const float* p, float* dp, int64_t n, float scale, float inner);
float Dot(const float* a, const float* b, int64_t n);

// y = silu(gate) * up.
void SwiGlu(const float* gate, const float* up, int64_t n, float* y);
void SwiGluGradient(const float* gate, const float* up, const float* dy, int64_t n, float* dgate, float* dup);

// y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
void GeluTanh(const float* x, int64_t n, float* y);
void GeluTanhGradient(const float* x, const float* dy, int64_t n, float* dx);

// y[2i] = cos[2i] x[2i] + sin[2i] x[2i + 1], y[2i + 1] = cos[2i + 1] x[2i + 1] + sin[2i + 1] x[2i]; `sin_sign` multiplies every sin. n is
// even; y may be x.
void RotatePairs(const float* x, const float* cos, const float* sin, int64_t n, float sin_sign, float* y);

// y = x / rms(x) * weight; returns 1 / rms(x), rms(x) = sqrt(mean(x^2) + eps).
float RmsNorm(const float* x, const float* weight, int64_t n, float eps, float* y);
// dx, and dweight += dy * x * inverse_rms.
void RmsNormGradient(const float* x, const float* weight, const float* dy, int64_t n, float inverse_rms, float* dx, float* dweight);

}  // namespace moonpipe::rows
