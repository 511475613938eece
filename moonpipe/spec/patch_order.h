// In which order the patches of a picture stand in its tensor.
//
//   grid of 4 x 4, raster: 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15       row after row
//   grid of 4 x 4, block:  0 1 4 5 | 2 3 6 7 | 8 9 12 13 | 10 11 14 15       the patches of one feature row together
//
// MoonViT's own processors write raster. One field, `vision_config.patch_order` (optional, "raster"), tells the dataloader how to cut
// and the tower how to read, so that the two cannot differ.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"

namespace moonpipe {

enum class PatchOrder { kRaster, kBlock };

// "raster" and "block"; nothing else.
std::optional<PatchOrder> ParsePatchOrder(absl::string_view name);
absl::string_view PatchOrderName(PatchOrder order);

// Raster number of the patch at each place of a frame. `rows` and `columns` are multiples of `merge_rows` and `merge_columns`.
std::vector<int64_t> PatchSequence(PatchOrder order, int64_t rows, int64_t columns, int64_t merge_rows, int64_t merge_columns);

}  // namespace moonpipe
