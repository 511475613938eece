#include "moonpipe/data/picture_warp.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numbers>
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

TEST(PictureWarpTest, MovesPixelsAcrossPatchesAndFillsWithZero) {
  const PicturePatches picture = Numbered(2, 4, 2);  // 4 x 8 pixels
  const PicturePatches shifted = WarpPicture(picture, {.right = 3, .down = -1, .source = {65536, 0, 0, 65536}}, RuleOf(2));
  for (int32_t y = 0; y < 4; ++y) {
    for (int32_t x = 0; x < 8; ++x) {
      const bool inside = y + 1 < 4 && x - 3 >= 0;
      EXPECT_EQ(PixelAt(shifted, 2, y, x), inside ? PixelAt(picture, 2, y + 1, x - 3) : 0) << y << " " << x;
    }
  }
}

TEST(PictureWarpTest, NoShiftChangesNothing) {
  const PicturePatches picture = Numbered(2, 2, 2);
  EXPECT_EQ(WarpPicture(picture, {}, RuleOf(2)).patches, picture.patches);
}

TEST(PictureWarpTest, AQuarterTurnMovesEveryPixelToItsPlace) {
  const PicturePatches picture = Numbered(2, 2, 2);  // 4 x 4 pixels
  PictureWarp turn;
  turn.source = {0, 65536, -65536, 0};
  const PicturePatches turned = WarpPicture(picture, turn, RuleOf(2));
  for (int32_t y = 0; y < 4; ++y) {
    for (int32_t x = 0; x < 4; ++x) EXPECT_EQ(PixelAt(turned, 2, y, x), PixelAt(picture, 2, 3 - x, y)) << y << " " << x;
  }
}

TEST(PictureWarpTest, HalfSizeTakesTheMeanOfNeighboursAndLeavesTheRimEmpty) {
  const PicturePatches picture = Numbered(2, 2, 2);
  PictureWarp half;
  half.source = {2 * 65536, 0, 0, 2 * 65536};
  const PicturePatches small = WarpPicture(picture, half, RuleOf(2));
  // The centre's four pixels come from (0.5, 0.5), (0.5, 2.5), ...: pixel (y, x) is 1 + 4 y + x, so a mean is exact up to rounding.
  EXPECT_EQ(PixelAt(small, 2, 1, 1), 4);  // 3.5, rounded up
  EXPECT_EQ(PixelAt(small, 2, 2, 2), 14);  // 13.5
  EXPECT_EQ(PixelAt(small, 2, 0, 0), 0);
  EXPECT_EQ(PixelAt(small, 2, 3, 1), 0);
}

TEST(PictureWarpTest, IsDrawnFromSeedEpochSampleAndPictureAlone) {
  const WarpLimits limits{.shift_pixels = 2, .rotation_degrees = 10, .scale = 0.25};
  EXPECT_EQ(DrawWarp(1, 2, 3, 0, limits), DrawWarp(1, 2, 3, 0, limits));
  EXPECT_NE(DrawWarp(1, 2, 3, 0, limits), DrawWarp(1, 2, 3, 1, limits));
  std::set<std::pair<int32_t, int32_t>> seen;
  double least_scale = 9, most_scale = 0, least_angle = 9, most_angle = -9;
  for (uint64_t epoch = 0; epoch < 2000; ++epoch) {
    const PictureWarp warp = DrawWarp(1, epoch, 3, 0, limits);
    EXPECT_LE(std::abs(warp.right), 2);
    EXPECT_LE(std::abs(warp.down), 2);
    seen.insert({warp.right, warp.down});
    const double scale = std::hypot(static_cast<double>(warp.source[0]), static_cast<double>(warp.source[1])) / 65536;
    const double angle = std::atan2(static_cast<double>(warp.source[1]), static_cast<double>(warp.source[0])) * 180 / std::numbers::pi;
    least_scale = std::min(least_scale, scale);
    most_scale = std::max(most_scale, scale);
    least_angle = std::min(least_angle, angle);
    most_angle = std::max(most_angle, angle);
  }
  EXPECT_EQ(seen.size(), 25u) << "every shift occurs";
  EXPECT_NEAR(least_scale, 0.8, 0.005);
  EXPECT_NEAR(most_scale, 1.25, 0.005);
  EXPECT_NEAR(least_angle, -10, 0.1);
  EXPECT_NEAR(most_angle, 10, 0.1);
  EXPECT_EQ(DrawWarp(1, 2, 3, 0, {}), PictureWarp());
}

}  // namespace
}  // namespace moonpipe
