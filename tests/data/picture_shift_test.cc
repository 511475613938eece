#include "moonpipe/data/picture_shift.h"

#include <set>
#include <utility>

#include "gtest/gtest.h"

namespace moonpipe {
namespace {

PictureRule RuleOf(int32_t patch_size) {
  PictureRule rule;
  rule.patch_size = patch_size;
  rule.merge = 1;
  return rule;
}

// One channel value a pixel, 1 + y * width + x, the same in all channels.
PicturePatches Numbered(uint32_t rows, uint32_t columns, int32_t patch) {
  PicturePatches picture{rows, columns, {}};
  for (uint32_t row = 0; row < rows; ++row) {
    for (uint32_t column = 0; column < columns; ++column) {
      for (int channel = 0; channel < 3; ++channel) {
        for (int32_t y = 0; y < patch; ++y) {
          for (int32_t x = 0; x < patch; ++x) {
            const int32_t all_y = static_cast<int32_t>(row) * patch + y, all_x = static_cast<int32_t>(column) * patch + x;
            picture.patches.push_back(static_cast<uint8_t>(1 + all_y * static_cast<int32_t>(columns) * patch + all_x));
          }
        }
      }
    }
  }
  return picture;
}

uint8_t PixelAt(const PicturePatches& picture, int32_t patch, int32_t y, int32_t x) {
  const size_t place = static_cast<size_t>(y / patch) * picture.columns + static_cast<size_t>(x / patch);
  return picture.patches[place * 3 * static_cast<size_t>(patch * patch) + static_cast<size_t>((y % patch) * patch + x % patch)];
}

TEST(PictureShift, MovesPixelsAcrossPatchesAndFillsWithZero) {
  const PicturePatches picture = Numbered(2, 4, 2);  // 4 x 8 pixels
  const PicturePatches shifted = ShiftPicture(picture, {.right = 3, .down = -1}, RuleOf(2));
  for (int32_t y = 0; y < 4; ++y) {
    for (int32_t x = 0; x < 8; ++x) {
      const bool inside = y + 1 < 4 && x - 3 >= 0;
      EXPECT_EQ(PixelAt(shifted, 2, y, x), inside ? PixelAt(picture, 2, y + 1, x - 3) : 0) << y << " " << x;
    }
  }
}

TEST(PictureShift, NoShiftChangesNothing) {
  const PicturePatches picture = Numbered(2, 2, 2);
  EXPECT_EQ(ShiftPicture(picture, {}, RuleOf(2)).patches, picture.patches);
}

TEST(PictureShift, IsDrawnFromSeedEpochSampleAndPictureAlone) {
  EXPECT_EQ(DrawShift(1, 2, 3, 0, 7), DrawShift(1, 2, 3, 0, 7));
  std::set<std::pair<int32_t, int32_t>> seen;
  for (uint64_t epoch = 0; epoch < 2000; ++epoch) {
    const PictureShift shift = DrawShift(1, epoch, 3, 0, 2);
    EXPECT_LE(std::abs(shift.right), 2);
    EXPECT_LE(std::abs(shift.down), 2);
    seen.insert({shift.right, shift.down});
  }
  EXPECT_EQ(seen.size(), 25u) << "every shift occurs";
  EXPECT_EQ(DrawShift(1, 2, 3, 0, 0), PictureShift());
}

}  // namespace
}  // namespace moonpipe
