#include "moonpipe/data/picture_rule.h"

#include <array>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/data/skip.h"

namespace moonpipe {
namespace {

using testing::HasSubstr;

PictureRule Rule(SizeRule size_rule, int32_t limit) {
  PictureRule rule;
  rule.size_rule = size_rule;
  rule.max_patches = limit;
  return rule;
}

// resized width and height, grid rows and columns, positions.
using Sizes = std::array<int64_t, 5>;
Sizes SizesOf(int32_t width, int32_t height, const PictureRule& rule) {
  const auto size = SizePicture(width, height, rule);
  EXPECT_TRUE(size.ok()) << size.status();
  if (!size.ok()) return {};
  EXPECT_EQ(size->padded_width, static_cast<int32_t>(size->columns) * 14);
  EXPECT_EQ(size->padded_height, static_cast<int32_t>(size->rows) * 14);
  return {size->width, size->height, size->rows, size->columns, MediaPositions(size->rows, size->columns, 2)};
}

TEST(InTokenLimit, IsAppliedBeforePadding) {
  EXPECT_EQ(SizesOf(1000, 1000, Rule(SizeRule::kInTokenLimit, 4096)), (Sizes{901, 901, 66, 66, 1089}));
  EXPECT_EQ(SizesOf(4096, 4096, Rule(SizeRule::kInTokenLimit, 16384)), (Sizes{1795, 1795, 130, 130, 4225}));
  EXPECT_EQ(SizesOf(1792, 1792, Rule(SizeRule::kInTokenLimit, 4096)), (Sizes{896, 896, 64, 64, 1024}));
}

TEST(InTokenLimit, NeverEnlargesAndKeepsRowsAndColumnsApart) {
  EXPECT_EQ(SizesOf(57, 13, Rule(SizeRule::kInTokenLimit, 4096)), (Sizes{57, 13, 2, 6, 3}));
}

TEST(InTokenLimit, RefusesASideOf512Patches) {
  const PictureRule rule = Rule(SizeRule::kInTokenLimit, 4096);
  EXPECT_TRUE(SizePicture(7140, 14, rule).ok()) << "510 patches";
  const absl::Status refused = SizePicture(7141, 14, rule).status();
  EXPECT_EQ(SkipReason(refused), "bad_picture");
  EXPECT_THAT(refused.message(), HasSubstr("2x512"));
}

TEST(PatchLimits, GiveTheWorkedValues) {
  const PictureRule rule = Rule(SizeRule::kPatchLimits, 16384);
  EXPECT_EQ(SizesOf(1920, 1080, rule), (Sizes{1920, 1080, 78, 138, 2691}));
  EXPECT_EQ(SizesOf(5000, 4000, rule), (Sizes{2006, 1605, 116, 144, 4176})) << "16704 patches are more than the limit";
  EXPECT_EQ(SizesOf(10000, 200, rule), (Sizes{7168, 143, 12, 512, 1536}));
  EXPECT_EQ(SizesOf(32, 32, rule), (Sizes{32, 32, 4, 4, 4}));
  EXPECT_EQ(SizesOf(4096, 4096, rule), (Sizes{1795, 1795, 130, 130, 4225}));
}

TEST(PatchLimits, KeepOnePixelOfASideThatShrinksToNothing) {
  EXPECT_EQ(SizesOf(100000, 3, Rule(SizeRule::kPatchLimits, 16384)), (Sizes{7167, 1, 2, 512, 256}));
}

TEST(PatchLimits, RefuseASideThatPaddingMakesTooLong) {
  PictureRule rule = Rule(SizeRule::kPatchLimits, 16384);
  rule.max_side_patches = 7;
  EXPECT_THAT(SizePicture(300, 20, rule).status().message(), HasSubstr("2x8 patches; a side may have 7"));
}

TEST(PatchLimits, RefuseAnotherNumberOfPositionsThanTheFixedOne) {
  PictureRule rule = Rule(SizeRule::kPatchLimits, 16384);
  rule.fixed_positions = 4;
  EXPECT_TRUE(SizePicture(56, 56, rule).ok());
  EXPECT_THAT(SizePicture(56, 28, rule).status().message(), HasSubstr("2 positions; fixed_output_tokens is 4"));
}

TEST(SizePicture, HasNoLimitOfItsOwn) {
  const absl::Status refused = SizePicture(56, 56, PictureRule()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(SkipReason(refused).has_value()) << "no fault of the sample";
}

}  // namespace
}  // namespace moonpipe
