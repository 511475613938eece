#include "moonpipe/data/resize.h"

#include <algorithm>
#include <cmath>

namespace moonpipe {
namespace {

constexpr int kFractionBits = 22;  // 32, less 8 bits of the pixel and 2 for overshoot
constexpr double kSupport = 2.0;

double Cubic(double x) {
  constexpr double a = -0.5;
  x = std::abs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

// Of one output pixel: the input pixels from `first`, and their fixed-point weights.
struct Taps {
  int32_t first = 0;
  std::vector<int32_t> weights;
};

// The arithmetic is in the order of Pillow's, on which the last bit of a weight depends.
std::vector<Taps> MakeTaps(int32_t in, int32_t out) {
  const double scale = static_cast<double>(in) / out;
  const double filter_scale = std::max(scale, 1.0);
  const double support = kSupport * filter_scale;
  const double inverse = 1.0 / filter_scale;
  std::vector<Taps> result(out);
  std::vector<double> weights;
  for (int32_t i = 0; i < out; ++i) {
    const double center = (i + 0.5) * scale;
    const int32_t first = std::max(static_cast<int32_t>(center - support + 0.5), 0);
    const int32_t last = std::min(static_cast<int32_t>(center + support + 0.5), in);
    weights.clear();
    double sum = 0.0;
    for (int32_t x = first; x < last; ++x) {
      weights.push_back(Cubic((x - center + 0.5) * inverse));
      sum += weights.back();
    }
    result[i].first = first;
    for (double weight : weights) {
      if (sum != 0.0) weight /= sum;
      result[i].weights.push_back(static_cast<int32_t>((weight < 0 ? -0.5 : 0.5) + weight * (1 << kFractionBits)));
    }
  }
  return result;
}

constexpr int32_t kHalf = 1 << (kFractionBits - 1);

uint8_t ToByte(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kFractionBits, 0, 255)); }

// One pixel: red, green, blue and nothing.
using Lanes = int32_t __attribute__((vector_size(16)));

// Both passes are whole numbers, so every machine's instructions give the same bytes. They are compiled once for any machine and once
// for AVX2, which multiplies 32-bit numbers four times as fast.
__attribute__((always_inline)) inline void FilterRow(const Lanes* in, const std::vector<Taps>& taps, uint8_t* out) {
  for (const Taps& tap : taps) {
    Lanes sum = {kHalf, kHalf, kHalf, kHalf};
    const Lanes* pixel = in + tap.first;
    for (const int32_t weight : tap.weights) sum += *pixel++ * weight;
    for (int c = 0; c < 3; ++c) *out++ = ToByte(sum[c]);
  }
}

__attribute__((always_inline)) inline void FilterColumns(const uint8_t* in, size_t stride, const Taps& tap, int32_t* sums, uint8_t* out) {
  std::fill(sums, sums + stride, kHalf);
  for (const int32_t weight : tap.weights) {
#pragma omp simd
    for (size_t i = 0; i < stride; ++i) sums[i] += in[i] * weight;
    in += stride;
  }
#pragma omp simd
  for (size_t i = 0; i < stride; ++i) out[i] = ToByte(sums[i]);
}

void FilterRowPlain(const Lanes* in, const std::vector<Taps>& taps, uint8_t* out) { FilterRow(in, taps, out); }
void FilterColumnsPlain(const uint8_t* in, size_t stride, const Taps& tap, int32_t* sums, uint8_t* out) {
  FilterColumns(in, stride, tap, sums, out);
}
#if defined(__x86_64__)
__attribute__((target("avx2"))) void FilterRowAvx2(const Lanes* in, const std::vector<Taps>& taps, uint8_t* out) {
  FilterRow(in, taps, out);
}
__attribute__((target("avx2"))) void FilterColumnsAvx2(const uint8_t* in, size_t stride, const Taps& tap, int32_t* sums, uint8_t* out) {
  FilterColumns(in, stride, tap, sums, out);
}
bool HasAvx2() { return __builtin_cpu_supports("avx2") != 0; }
#else
constexpr auto FilterRowAvx2 = FilterRowPlain;
constexpr auto FilterColumnsAvx2 = FilterColumnsPlain;
bool HasAvx2() { return false; }
#endif

RgbImage ResizeRows(const RgbImage& image, int32_t width, bool avx2) {
  const std::vector<Taps> taps = MakeTaps(image.width, width);
  const auto filter = avx2 ? FilterRowAvx2 : FilterRowPlain;
  RgbImage result{width, image.height, std::vector<uint8_t>(static_cast<size_t>(width) * image.height * 3)};
  std::vector<Lanes> lanes(static_cast<size_t>(image.width));
  for (int32_t y = 0; y < image.height; ++y) {
    const uint8_t* row = image.pixels.data() + static_cast<size_t>(y) * image.width * 3;
    for (Lanes& pixel : lanes) {
      pixel = Lanes{row[0], row[1], row[2], 0};
      row += 3;
    }
    filter(lanes.data(), taps, result.pixels.data() + static_cast<size_t>(y) * width * 3);
  }
  return result;
}

RgbImage ResizeColumns(const RgbImage& image, int32_t height, bool avx2) {
  const std::vector<Taps> taps = MakeTaps(image.height, height);
  const auto filter = avx2 ? FilterColumnsAvx2 : FilterColumnsPlain;
  const size_t stride = static_cast<size_t>(image.width) * 3;
  RgbImage result{image.width, height, std::vector<uint8_t>(stride * height)};
  std::vector<int32_t> sums(stride);
  for (int32_t y = 0; y < height; ++y) {
    filter(image.pixels.data() + taps[y].first * stride, stride, taps[y], sums.data(), result.pixels.data() + y * stride);
  }
  return result;
}

}  // namespace

RgbImage ResizeBicubic(const RgbImage& image, int32_t width, int32_t height, bool plain) {
  const bool avx2 = !plain && HasAvx2();
  RgbImage result = width == image.width ? image : ResizeRows(image, width, avx2);
  return height == result.height ? result : ResizeColumns(result, height, avx2);
}

}  // namespace moonpipe
