// Picture files to the patches that the vision tower takes: decode, lay over the background if the rule names one, shrink
// (picture_rule.h), pad with zeros at the right and below, cut. Normalising to (value/255 - 0.5) / 0.5 is left to the vision tower; a
// padded zero becomes -1 there.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "moonpipe/data/image.h"
#include "moonpipe/data/picture_rule.h"

namespace moonpipe {

// A picture (frames == 1) or a clip.
struct PicturePatches {
  uint32_t rows = 0, columns = 0;
  std::vector<uint8_t> patches;  // [frames * rows * columns, 3, patch, patch], frame after frame in the rule's patch order
  uint32_t frames = 1;
};

// PNG only. Fails with a SkipError (bad_picture) for an empty, damaged or too large file and for other formats.
absl::StatusOr<PicturePatches> ProcessPicture(absl::string_view file_bytes, const PictureRule& rule);

// The same for a decoded picture without transparency.
absl::StatusOr<PicturePatches> ProcessImage(const RgbImage& image, const PictureRule& rule);

// Pads `image` with zeros to the grid and cuts it into patches.
std::vector<uint8_t> CutPatches(const RgbImage& image, uint32_t rows, uint32_t columns, const PictureRule& rule);

}  // namespace moonpipe
