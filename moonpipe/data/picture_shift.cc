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

}  // namespace

PictureShift DrawShift(uint64_t seed, uint64_t epoch, uint64_t sample, uint64_t picture, uint32_t max_pixels) {
  if (max_pixels == 0) return {};
  const uint64_t bits = Mix(Mix(Mix(Mix(seed) ^ epoch) ^ sample) ^ picture);
  const uint64_t choices = 2 * uint64_t{max_pixels} + 1;
  auto draw = [&](uint64_t half) { return static_cast<int32_t>(half % choices) - static_cast<int32_t>(max_pixels); };
  return {draw(bits & 0xffffffffu), draw(bits >> 32)};
}

PicturePatches ShiftPicture(const PicturePatches& picture, const PictureShift& shift, const PictureRule& rule) {
  const auto side = static_cast<size_t>(rule.patch_size);
  const size_t plane = side * side;
  const size_t frame_bytes = size_t{picture.rows} * picture.columns * 3 * plane;
  PicturePatches shifted{picture.rows, picture.columns, std::vector<uint8_t>(picture.patches.size(), 0), picture.frames};
  const std::vector<int64_t> sequence = PatchSequence(rule.patch_order, picture.rows, picture.columns, rule.merge, rule.merge);
  std::vector<size_t> place_of(sequence.size());
  for (size_t place = 0; place < sequence.size(); ++place) place_of[static_cast<size_t>(sequence[place])] = place;
  const auto index = [&](int32_t y, int32_t x) {
    const auto row = static_cast<size_t>(y), column = static_cast<size_t>(x);
    return place_of[row / side * picture.columns + column / side] * 3 * plane + row % side * side + column % side;
  };
  const auto height = static_cast<int32_t>(picture.rows) * rule.patch_size, width = static_cast<int32_t>(picture.columns) * rule.patch_size;
  for (size_t frame = 0; frame < picture.frames; ++frame) {
    uint8_t* out = shifted.patches.data() + frame * frame_bytes;
    const uint8_t* in = picture.patches.data() + frame * frame_bytes;
    for (int32_t y = std::max(0, shift.down); y < std::min(height, height + shift.down); ++y) {
      for (int32_t x = std::max(0, shift.right); x < std::min(width, width + shift.right); ++x) {
        const size_t to = index(y, x), from = index(y - shift.down, x - shift.right);
        for (size_t channel = 0; channel < 3; ++channel) out[to + channel * plane] = in[from + channel * plane];
      }
    }
  }
  return shifted;
}

}  // namespace moonpipe
