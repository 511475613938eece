#include "moonpipe/data/image_processor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/background.h"
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

// The middle of a picture that is at least as large. Halves round to even, as the reference's crop does.
RgbImage CropMiddle(const RgbImage& image, int32_t width, int32_t height) {
  const auto left = static_cast<size_t>(std::nearbyint((image.width - width) / 2.0));
  const auto top = static_cast<size_t>(std::nearbyint((image.height - height) / 2.0));
  RgbImage result{width, height, std::vector<uint8_t>(static_cast<size_t>(width) * height * 3)};
  const size_t bytes = static_cast<size_t>(width) * 3;
  for (size_t y = 0; y < static_cast<size_t>(height); ++y) {
    std::memcpy(result.pixels.data() + y * bytes, image.pixels.data() + ((top + y) * image.width + left) * 3, bytes);
  }
  return result;
}

}  // namespace

std::vector<uint8_t> CutPatches(const RgbImage& image, uint32_t rows, uint32_t columns, const PictureRule& rule) {
  const auto side = static_cast<size_t>(rule.patch_size);
  const size_t plane = side * side;
  std::vector<uint8_t> patches(size_t{rows} * columns * 3 * plane);
  const std::vector<int64_t> sequence = PatchSequence(rule.patch_order, rows, columns, rule.merge, rule.merge);
  std::vector<size_t> place_of(sequence.size());
  for (size_t place = 0; place < sequence.size(); ++place) place_of[static_cast<size_t>(sequence[place])] = place;
  const auto width = static_cast<size_t>(image.width);
  for (size_t y = 0; y < static_cast<size_t>(image.height); ++y) {
    const uint8_t* in = image.pixels.data() + y * width * 3;
    for (size_t left = 0; left < width; left += side) {
      uint8_t* out = patches.data() + place_of[y / side * columns + left / side] * 3 * plane + y % side * side;
      const size_t end = std::min(side, width - left);
      for (size_t x = 0; x < end; ++x, in += 3) {
        out[x] = in[0];
        out[x + plane] = in[1];
        out[x + 2 * plane] = in[2];
      }
    }
  }
  return patches;
}

absl::StatusOr<PicturePatches> ProcessImage(const RgbImage& image, const PictureRule& rule) {
  MOONPIPE_ASSIGN_OR_RETURN(const PictureSize size, SizePicture(image.width, image.height, rule));
  RgbImage changed;
  const RgbImage* current = &image;
  if (size.width != image.width || size.height != image.height) {
    changed = ResizeBicubic(image, size.width, size.height);
    current = &changed;
  }
  if (!rule.pad && (size.padded_width != size.width || size.padded_height != size.height)) {
    changed = CropMiddle(*current, size.padded_width, size.padded_height);
    current = &changed;
  }
  return PicturePatches{size.rows, size.columns, CutPatches(*current, size.rows, size.columns, rule)};
}

absl::StatusOr<PicturePatches> ProcessPicture(absl::string_view file_bytes, const PictureRule& rule) {
  if (!absl::StartsWith(file_bytes, kPngSignature)) return SkipError(kBadPicture, DescribeFormat(file_bytes));
  std::vector<uint8_t> alpha;
  absl::StatusOr<RgbImage> image = DecodePng(file_bytes, kMostPixels, rule.background.has_value() ? &alpha : nullptr);
  if (!image.ok()) return SkipError(kBadPicture, image.status().message());
  if (!alpha.empty()) LayOverBackground(alpha, *rule.background, *image);
  return ProcessImage(*image, rule);
}

}  // namespace moonpipe
