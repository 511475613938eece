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

uint8_t ToByte(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kFractionBits, 0, 255)); }

RgbImage ResizeRows(const RgbImage& image, int32_t width) {
  const std::vector<Taps> taps = MakeTaps(image.width, width);
  RgbImage result{width, image.height, std::vector<uint8_t>(static_cast<size_t>(width) * image.height * 3)};
  for (int32_t y = 0; y < image.height; ++y) {
    const uint8_t* row = image.pixels.data() + static_cast<size_t>(y) * image.width * 3;
    uint8_t* out = result.pixels.data() + static_cast<size_t>(y) * width * 3;
    for (const Taps& tap : taps) {
      int32_t sum[3] = {1 << (kFractionBits - 1), 1 << (kFractionBits - 1), 1 << (kFractionBits - 1)};
      const uint8_t* in = row + static_cast<size_t>(tap.first) * 3;
      for (const int32_t weight : tap.weights) {
        for (int c = 0; c < 3; ++c) sum[c] += in[c] * weight;
        in += 3;
      }
      for (int c = 0; c < 3; ++c) *out++ = ToByte(sum[c]);
    }
  }
  return result;
}

RgbImage ResizeColumns(const RgbImage& image, int32_t height) {
  const std::vector<Taps> taps = MakeTaps(image.height, height);
  const size_t stride = static_cast<size_t>(image.width) * 3;
  RgbImage result{image.width, height, std::vector<uint8_t>(stride * height)};
  std::vector<int32_t> sums(stride);
  for (int32_t y = 0; y < height; ++y) {
    std::fill(sums.begin(), sums.end(), 1 << (kFractionBits - 1));
    const uint8_t* in = image.pixels.data() + taps[y].first * stride;
    for (const int32_t weight : taps[y].weights) {
      for (size_t i = 0; i < stride; ++i) sums[i] += in[i] * weight;
      in += stride;
    }
    uint8_t* out = result.pixels.data() + y * stride;
    for (size_t i = 0; i < stride; ++i) out[i] = ToByte(sums[i]);
  }
  return result;
}

}  // namespace

RgbImage ResizeBicubic(const RgbImage& image, int32_t width, int32_t height) {
  RgbImage result = width == image.width ? image : ResizeRows(image, width);
  return height == result.height ? result : ResizeColumns(result, height);
}

}  // namespace moonpipe
