// Transparent pictures over a background: c = alpha / 255 * c + (1 - alpha / 255) * background, in fp32, cut to whole levels.
#pragma once

#include <cstdint>
#include <vector>

#include "moonpipe/data/image.h"
#include "moonpipe/data/picture_rule.h"

namespace moonpipe {

// `alpha` [height, width] are opacities of `image`.
void LayOverBackground(const std::vector<uint8_t>& alpha, const PictureBackground& background, RgbImage& image);

}  // namespace moonpipe
