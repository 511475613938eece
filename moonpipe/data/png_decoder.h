// PNG files to RGB, with the values that Pillow's convert("RGB") gives: grey is repeated, palettes are looked up, alpha and
// transparent colours are dropped without blending, and of 16 bits the high 8 are kept, except that 16-bit grey without alpha is
// clipped at 255 (Pillow's way with it). Colour profiles are not applied.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "moonpipe/data/image.h"

namespace moonpipe {

// More pixels than this are refused before memory is taken for them: a small file can claim any size.
inline constexpr int64_t kMostPixels = int64_t{1} << 27;

// INVALID_ARGUMENT for bytes that are not a whole, undamaged PNG, or one of more than `most_pixels`. `alpha`, where given, receives
// [height, width] opacities, or nothing where the file has no transparency.
absl::StatusOr<RgbImage> DecodePng(absl::string_view bytes, int64_t most_pixels = kMostPixels, std::vector<uint8_t>* alpha = nullptr);

}  // namespace moonpipe
