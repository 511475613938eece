#include "moonpipe/data/picture_rule.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "moonpipe/data/skip.h"

namespace moonpipe {
namespace {

// The arithmetic of both is in the order of the reference's: the last bit decides about a pixel.
PictureSize ShrinkByPatches(int32_t width, int32_t height, const PictureRule& rule) {
  PictureSize size{width, height};
  const int64_t patches = int64_t{width / rule.patch_size} * (height / rule.patch_size);
  if (patches > rule.max_patches) {
    const double scale = std::sqrt(static_cast<double>(rule.max_patches) / static_cast<double>(patches));
    size.width = static_cast<int32_t>(width * scale);
    size.height = static_cast<int32_t>(height * scale);
  }
  return size;
}

PictureSize ShrinkBySides(int32_t width, int32_t height, const PictureRule& rule) {
  const double columns = std::max(1.0, static_cast<double>(width / rule.patch_size));
  const double rows = std::max(1.0, static_cast<double>(height / rule.patch_size));
  const int32_t longest = rule.max_side_patches * rule.patch_size;
  const double scale = std::min({1.0, std::sqrt(rule.max_patches / (columns * rows)), static_cast<double>(longest) / width,
                                 static_cast<double>(longest) / height});
  const auto side = [&](int32_t pixels) { return std::min(std::max(1, static_cast<int32_t>(pixels * scale)), longest); };
  return {side(width), side(height)};
}

}  // namespace

absl::StatusOr<PictureSize> SizePicture(int32_t width, int32_t height, const PictureRule& rule) {
  if (rule.max_patches < 1) {
    return absl::InvalidArgumentError(absl::StrCat("the patch limit of a picture is ", rule.max_patches, "; it must be at least 1"));
  }
  const bool by_sides = rule.size_rule == SizeRule::kPatchLimits;
  PictureSize size = by_sides ? ShrinkBySides(width, height, rule) : ShrinkByPatches(width, height, rule);
  const int64_t unit = int64_t{rule.patch_size} * rule.merge;
  const auto whole = [&](int64_t pixels) { return (rule.pad ? pixels + unit - 1 : pixels) / unit * unit; };
  const int64_t padded_width = whole(size.width), padded_height = whole(size.height);
  if (padded_width < 1 || padded_height < 1) {
    return SkipError(kBadPicture, absl::StrCat("a picture of ", width, "x", height, " pixels becomes ", size.width, "x", size.height,
                                               " under the limit of ", rule.max_patches, " patches, of which nothing is left"));
  }
  const int64_t columns = padded_width / rule.patch_size, rows = padded_height / rule.patch_size;
  const int64_t most = by_sides ? rule.max_side_patches : rule.max_side_patches - 1;
  if (columns > most || rows > most) {
    return SkipError(kBadPicture, absl::StrCat("a picture of ", width, "x", height, " pixels makes ", rows, "x", columns,
                                               " patches; a side may have ", most));
  }
  size.padded_width = static_cast<int32_t>(padded_width);
  size.padded_height = static_cast<int32_t>(padded_height);
  size.rows = static_cast<uint32_t>(rows);
  size.columns = static_cast<uint32_t>(columns);
  const uint32_t positions = MediaPositions(size.rows, size.columns, rule.merge);
  if (rule.fixed_positions.has_value() && positions != static_cast<uint32_t>(*rule.fixed_positions)) {
    return SkipError(kBadPicture, absl::StrCat("a picture of ", width, "x", height, " pixels has ", positions,
                                               " positions; fixed_output_tokens is ", *rule.fixed_positions));
  }
  return size;
}

}  // namespace moonpipe
