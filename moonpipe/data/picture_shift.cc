#include "moonpipe/data/picture_shift.h"

#include <algorithm>

namespace moonpipe {
namespace {

// SplitMix64's finaliser (S. Vigna): every bit of the input moves every bit of the output.
uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// Index of a pixel in patches [rows * columns, 3, patch, patch].
size_t PixelIndex(const PicturePatches& picture, int32_t patch, int32_t channel, int32_t y, int32_t x) {
  const auto p = static_cast<size_t>(patch);
  const size_t place = static_cast<size_t>(y / patch) * picture.columns + static_cast<size_t>(x / patch);
  return ((place * 3 + static_cast<size_t>(channel)) * p + static_cast<size_t>(y % patch)) * p + static_cast<size_t>(x % patch);
}

}  // namespace

PictureShift DrawShift(uint64_t seed, uint64_t epoch, uint64_t sample, uint64_t picture, uint32_t max_pixels) {
  if (max_pixels == 0) return {};
  const uint64_t bits = Mix(Mix(Mix(Mix(seed) ^ epoch) ^ sample) ^ picture);
  const uint64_t choices = 2 * uint64_t{max_pixels} + 1;
  auto draw = [&](uint64_t half) { return static_cast<int32_t>(half % choices) - static_cast<int32_t>(max_pixels); };
  return {draw(bits & 0xffffffffu), draw(bits >> 32)};
}

PicturePatches ShiftPicture(const PicturePatches& picture, const PictureShift& shift, int32_t patch_size) {
  PicturePatches shifted{picture.rows, picture.columns, std::vector<uint8_t>(picture.patches.size(), 0)};
  const auto height = static_cast<int32_t>(picture.rows) * patch_size, width = static_cast<int32_t>(picture.columns) * patch_size;
  for (int32_t channel = 0; channel < 3; ++channel) {
    for (int32_t y = std::max(0, shift.down); y < std::min(height, height + shift.down); ++y) {
      for (int32_t x = std::max(0, shift.right); x < std::min(width, width + shift.right); ++x) {
        shifted.patches[PixelIndex(picture, patch_size, channel, y, x)] =
            picture.patches[PixelIndex(picture, patch_size, channel, y - shift.down, x - shift.right)];
      }
    }
  }
  return shifted;
}

}  // namespace moonpipe
