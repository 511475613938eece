#include "moonpipe/data/picture_warp.h"

#include <cmath>
#include <numbers>

#include "absl/strings/str_cat.h"

namespace moonpipe {
namespace {

constexpr int64_t kOne = 65536;

// SplitMix64's finaliser (S. Vigna): every bit of the input moves every bit of the output.
uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// Uniform in [-1, 1].
double Signed(uint64_t half) { return static_cast<double>(half) / 2147483647.5 - 1; }

}  // namespace

std::string PictureWarp::ToString() const {
  return absl::StrCat("warp ", right, " ", down, " ", source[0], " ", source[1], " ", source[2], " ", source[3], " ");
}

PictureWarp DrawWarp(uint64_t seed, uint64_t epoch, uint64_t sample, uint64_t picture, const WarpLimits& limits) {
  PictureWarp warp;
  const uint64_t bits = Mix(Mix(Mix(Mix(seed) ^ epoch) ^ sample) ^ picture);
  const uint64_t choices = 2 * uint64_t{limits.shift_pixels} + 1;
  auto draw = [&](uint64_t half) { return static_cast<int32_t>(half % choices) - static_cast<int32_t>(limits.shift_pixels); };
  warp.right = draw(bits & 0xffffffffu);
  warp.down = draw(bits >> 32);
  if (limits.rotation_degrees > 0 || limits.scale > 0) {
    const uint64_t more = Mix(bits);
    const double angle = Signed(more & 0xffffffffu) * limits.rotation_degrees * std::numbers::pi / 180;
    const double shrink = std::pow(1 + limits.scale, Signed(more >> 32));
    const int64_t cosine = std::llround(std::cos(angle) * shrink * kOne), sine = std::llround(std::sin(angle) * shrink * kOne);
    warp.source = {cosine, sine, -sine, cosine};
  }
  return warp;
}

PicturePatches WarpPicture(const PicturePatches& picture, const PictureWarp& warp, const PictureRule& rule) {
  PicturePatches warped{picture.rows, picture.columns, std::vector<uint8_t>(picture.patches.size(), 0), picture.frames};
  const auto height = static_cast<int32_t>(picture.rows) * rule.patch_size, width = static_cast<int32_t>(picture.columns) * rule.patch_size;
  const auto side = static_cast<size_t>(rule.patch_size);
  const size_t plane = side * side, frame_bytes = size_t{picture.rows} * picture.columns * 3 * plane;
  const std::vector<int64_t> sequence = PatchSequence(rule.patch_order, picture.rows, picture.columns, rule.merge, rule.merge);
  std::vector<size_t> place_of(sequence.size());
  for (size_t place = 0; place < sequence.size(); ++place) place_of[static_cast<size_t>(sequence[place])] = place;
  // Of the first channel of a pixel of the first frame.
  const auto index = [&](int32_t y, int32_t x) {
    const auto row = static_cast<size_t>(y), column = static_cast<size_t>(x);
    return place_of[row / side * picture.columns + column / side] * 3 * plane + row % side * side + column % side;
  };
  // Twice the distance to the centre is a whole number, and so are all products below.
  for (int32_t y = 0; y < height; ++y) {
    for (int32_t x = 0; x < width; ++x) {
      const int64_t from_x = 2 * (x - warp.right) - (width - 1), from_y = 2 * (y - warp.down) - (height - 1);
      const int64_t source_x = (warp.source[0] * from_x + warp.source[1] * from_y + (width - 1) * kOne) / 2;
      const int64_t source_y = (warp.source[2] * from_x + warp.source[3] * from_y + (height - 1) * kOne) / 2;
      // Shifting a negative number right rounds down.
      const auto left = static_cast<int32_t>(source_x >> 16), top = static_cast<int32_t>(source_y >> 16);
      const int64_t part_x = source_x & (kOne - 1), part_y = source_y & (kOne - 1);
      for (size_t i = 0; i < size_t{3} * picture.frames; ++i) {
        const size_t from = i / 3 * frame_bytes + i % 3 * plane;
        auto pixel = [&](int32_t row, int32_t column) -> int64_t {
          if (row < 0 || column < 0 || row >= height || column >= width) return 0;
          return picture.patches[from + index(row, column)];
        };
        const int64_t upper = pixel(top, left) * (kOne - part_x) + pixel(top, left + 1) * part_x;
        const int64_t lower = pixel(top + 1, left) * (kOne - part_x) + pixel(top + 1, left + 1) * part_x;
        warped.patches[from + index(y, x)] =
            static_cast<uint8_t>((upper * (kOne - part_y) + lower * part_y + kOne * kOne / 2) / (kOne * kOne));
      }
    }
  }
  return warped;
}

}  // namespace moonpipe
