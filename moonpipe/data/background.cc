#include "moonpipe/data/background.h"

namespace moonpipe {
namespace {

uint8_t BackgroundAt(const PictureBackground& background, int32_t x, int32_t y) {
  using Pattern = PictureBackground::Pattern;
  switch (background.pattern) {
    case Pattern::kWhite:
      return 255;
    case Pattern::kBlack:
      return 0;
    case Pattern::kGrey:
      return 128;
    case Pattern::kChessboard:
      break;
  }
  const bool odd = (x / background.square_size + y / background.square_size) % 2 != 0;
  return odd == background.white_first ? background.grey_value : background.white_value;
}

}  // namespace

void LayOverBackground(const std::vector<uint8_t>& alpha, const PictureBackground& background, RgbImage& image) {
  const uint8_t* opacity = alpha.data();
  uint8_t* pixel = image.pixels.data();
  for (int32_t y = 0; y < image.height; ++y) {
    for (int32_t x = 0; x < image.width; ++x, ++opacity, pixel += 3) {
      const float part = static_cast<float>(*opacity) / 255.0f;
      const float behind = (1.0f - part) * static_cast<float>(BackgroundAt(background, x, y));
      for (int c = 0; c < 3; ++c) {
        const float front = part * static_cast<float>(pixel[c]);
        pixel[c] = static_cast<uint8_t>(front + behind);
      }
    }
  }
}

}  // namespace moonpipe
