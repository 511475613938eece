// How large a picture becomes: the two size rules of the Kimi processors (architecture section 3.1). Pictures shrink and never grow.
// Padding comes after shrinking, so a padded picture may have more patches than the limit.
//
//   in_token_limit (Kimi-VL):  if floor(w/14) * floor(h/14) exceeds the limit, scale both sides by the root of limit over that,
//                              cut to whole pixels; a padded side of 512 patches or more is refused.
//   patch_limits (K2.5):       scale = min(1, sqrt(limit / (max(1, floor(w/14)) * max(1, floor(h/14)))), 14 Q / w, 14 Q / h), with Q
//                              the limit of a side; each side cut to whole pixels, at least 1 and at most 14 Q.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "moonpipe/spec/patch_order.h"

namespace moonpipe {

enum class SizeRule { kInTokenLimit, kPatchLimits };

// What stands behind the transparent parts of a picture. Without one, alpha is dropped and the colour below it shows.
struct PictureBackground {
  enum class Pattern { kWhite, kBlack, kGrey, kChessboard };
  Pattern pattern = Pattern::kBlack;
  // Of the chessboard; the square at the top left is white iff white_first.
  int32_t square_size = 16;
  bool white_first = true;
  uint8_t white_value = 255;
  uint8_t grey_value = 200;
};

enum class TimestampMode { kHoursMillis, kMinutesMillis, kMinutes };  // hh:mm:ss.fff, mm:ss.fff, mm:ss

// How frames become clips (K2.5).
struct ClipRule {
  double sample_fps = 2.0;
  int32_t frames_per_clip = 4;
  int32_t max_patches_each_frame = 0;
  std::optional<int32_t> max_patches_video;  // of all frames of a clip together
  std::optional<int32_t> max_frames;         // of a video
  TimestampMode timestamps = TimestampMode::kHoursMillis;
};

struct PictureRule {
  int32_t patch_size = 14;
  int32_t merge = 2;        // patches a side that become one position
  int32_t max_patches = 0;  // before padding; 0 is no rule at all and is refused
  SizeRule size_rule = SizeRule::kInTokenLimit;
  int32_t max_side_patches = 512;  // kInTokenLimit refuses a padded side of as many, kPatchLimits scales to it
  bool pad = true;                 // false: crop around the middle instead of padding (kInTokenLimit only)
  std::optional<int32_t> fixed_positions;  // every picture must have as many positions
  PatchOrder patch_order = PatchOrder::kRaster;
  std::optional<PictureBackground> background;
  std::optional<ClipRule> clips;  // absent: the model takes no video
};

struct PictureSize {
  int32_t width = 0, height = 0;                // after shrinking
  int32_t padded_width = 0, padded_height = 0;  // after padding or cropping
  uint32_t rows = 0, columns = 0;               // grid of patches
};

// Fails with a SkipError (bad_picture), with the numbers: a side that is too long or shrinks to nothing, or another number of
// positions than fixed_positions. INVALID_ARGUMENT when the rule has no limit.
absl::StatusOr<PictureSize> SizePicture(int32_t width, int32_t height, const PictureRule& rule);

// Media-placeholder positions of a grid; a clip has as many as one of its frames.
inline uint32_t MediaPositions(uint32_t rows, uint32_t columns, int32_t merge) {
  return rows * columns / static_cast<uint32_t>(merge * merge);
}

}  // namespace moonpipe
