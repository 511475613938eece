#include "moonpipe/spec/patch_order.h"

#include <numeric>

namespace moonpipe {

std::optional<PatchOrder> ParsePatchOrder(absl::string_view name) {
  if (name == "raster") return PatchOrder::kRaster;
  if (name == "block") return PatchOrder::kBlock;
  return std::nullopt;
}

absl::string_view PatchOrderName(PatchOrder order) { return order == PatchOrder::kRaster ? "raster" : "block"; }

std::vector<int64_t> PatchSequence(PatchOrder order, int64_t rows, int64_t columns, int64_t merge_rows, int64_t merge_columns) {
  std::vector<int64_t> sequence(static_cast<size_t>(rows * columns));
  std::iota(sequence.begin(), sequence.end(), 0);
  if (order == PatchOrder::kRaster) return sequence;
  auto place = sequence.begin();
  for (int64_t top = 0; top < rows; top += merge_rows) {
    for (int64_t left = 0; left < columns; left += merge_columns) {
      for (int64_t y = top; y < top + merge_rows; ++y) {
        for (int64_t x = left; x < left + merge_columns; ++x) *place++ = y * columns + x;
      }
    }
  }
  return sequence;
}

}  // namespace moonpipe
