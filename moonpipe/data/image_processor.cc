#include "moonpipe/data/image_processor.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/png_decoder.h"
#include "moonpipe/data/resize.h"
#include "moonpipe/data/skip.h"

namespace moonpipe {
namespace {

constexpr absl::string_view kPngSignature("\x89PNG\r\n\x1a\n", 8);

// What a file that is no PNG is, by its first bytes.
std::string DescribeFormat(absl::string_view bytes) {
  if (bytes.empty()) return "the picture file is empty";
  absl::string_view name = "file of an unknown format";
  if (absl::StartsWith(bytes, "\xff\xd8\xff")) name = "JPEG file";
  if (absl::StartsWith(bytes, "GIF8")) name = "GIF file";
  if (absl::StartsWith(bytes, "BM")) name = "BMP file";
  if (absl::StartsWith(bytes, "RIFF") && bytes.substr(0, 12).substr(8) == "WEBP") name = "WebP file";
  return absl::StrCat("the picture is a ", name, "; only PNG can be read");
}

}  // namespace

absl::StatusOr<PictureSize> SizePicture(int32_t width, int32_t height, const PictureRule& rule) {
  PictureSize size{width, height};
  const int64_t patches = int64_t{width / rule.patch_size} * (height / rule.patch_size);
  if (patches > rule.max_patches) {
    const double scale = std::sqrt(static_cast<double>(rule.max_patches) / static_cast<double>(patches));
    size.width = static_cast<int32_t>(width * scale);
    size.height = static_cast<int32_t>(height * scale);
  }
  if (size.width < 1 || size.height < 1) {
    return SkipError(kBadPicture, absl::StrCat("a picture of ", width, "x", height, " pixels shrinks to nothing under the limit of ",
                                               rule.max_patches, " patches"));
  }
  const int64_t unit = int64_t{rule.patch_size} * rule.merge;
  const int64_t padded_width = (size.width + unit - 1) / unit * unit, padded_height = (size.height + unit - 1) / unit * unit;
  const int64_t columns = padded_width / rule.patch_size, rows = padded_height / rule.patch_size;
  if (columns >= kSidePatchLimit || rows >= kSidePatchLimit) {
    return SkipError(kBadPicture, absl::StrCat("a picture of ", width, "x", height, " pixels makes ", rows, "x", columns,
                                               " patches; a side must have fewer than ", kSidePatchLimit));
  }
  size.padded_width = static_cast<int32_t>(padded_width);
  size.padded_height = static_cast<int32_t>(padded_height);
  size.rows = static_cast<uint32_t>(rows);
  size.columns = static_cast<uint32_t>(columns);
  return size;
}

std::vector<uint8_t> CutPatches(const RgbImage& image, uint32_t rows, uint32_t columns, int32_t patch_size) {
  const size_t side = static_cast<size_t>(patch_size);
  std::vector<uint8_t> patches(size_t{rows} * columns * 3 * side * side);
  for (size_t y = 0; y < static_cast<size_t>(image.height); ++y) {
    const uint8_t* in = image.pixels.data() + y * image.width * 3;
    for (size_t x = 0; x < static_cast<size_t>(image.width); ++x, in += 3) {
      const size_t patch = y / side * columns + x / side;
      uint8_t* out = patches.data() + patch * 3 * side * side + y % side * side + x % side;
      for (size_t c = 0; c < 3; ++c) out[c * side * side] = in[c];
    }
  }
  return patches;
}

absl::StatusOr<PicturePatches> ProcessPicture(absl::string_view file_bytes, const PictureRule& rule) {
  if (!absl::StartsWith(file_bytes, kPngSignature)) return SkipError(kBadPicture, DescribeFormat(file_bytes));
  absl::StatusOr<RgbImage> image = DecodePng(file_bytes);
  if (!image.ok()) return SkipError(kBadPicture, image.status().message());
  MOONPIPE_ASSIGN_OR_RETURN(const PictureSize size, SizePicture(image->width, image->height, rule));
  if (size.width != image->width || size.height != image->height) image = ResizeBicubic(*image, size.width, size.height);
  return PicturePatches{size.rows, size.columns, CutPatches(*image, size.rows, size.columns, rule.patch_size)};
}

}  // namespace moonpipe
