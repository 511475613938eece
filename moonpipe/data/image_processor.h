// Picture files to the patches that the vision tower takes. The rules of the Kimi-VL processor: shrink (never enlarge) so that
// floor(width/14) * floor(height/14) does not exceed the patch limit, cut to whole pixels, then pad with zeros at the right and
// below to multiples of 28. The padding comes after the limit, so the patch count may exceed it. Normalising to
// (value/255 - 0.5) / 0.5 is left to the vision tower; a padded zero becomes -1 there.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "moonpipe/data/image.h"

namespace moonpipe {

struct PictureRule {
  int32_t patch_size = 14;
  int32_t merge = 2;           // patches a side that become one position
  int32_t max_patches = 4096;  // before padding
};

// A padded picture must have fewer patches than this on each side.
inline constexpr int32_t kSidePatchLimit = 512;

struct PictureSize {
  int32_t width = 0, height = 0;                // after shrinking
  int32_t padded_width = 0, padded_height = 0;  // after padding
  uint32_t rows = 0, columns = 0;               // grid of patches
};

struct PicturePatches {
  uint32_t rows = 0, columns = 0;
  std::vector<uint8_t> patches;  // [rows * columns, 3, patch, patch], patches in raster order
};

// Fails with a SkipError (bad_picture) where a padded side has 512 patches or more, or nothing would be left of a side.
absl::StatusOr<PictureSize> SizePicture(int32_t width, int32_t height, const PictureRule& rule);

// Media-placeholder positions of a grid.
inline uint32_t MediaPositions(uint32_t rows, uint32_t columns, int32_t merge) {
  return rows * columns / static_cast<uint32_t>(merge * merge);
}

// Decodes, shrinks, pads and cuts. PNG only. Fails with a SkipError (bad_picture) for an empty, damaged or too large file and for
// other formats.
absl::StatusOr<PicturePatches> ProcessPicture(absl::string_view file_bytes, const PictureRule& rule);

// Pads `image` with zeros to the grid and cuts it into patches.
std::vector<uint8_t> CutPatches(const RgbImage& image, uint32_t rows, uint32_t columns, int32_t patch_size);

}  // namespace moonpipe
