// Bicubic resizing that gives Pillow's bytes. The kernel is Keys' cubic with a = -0.5, widened by the scale when shrinking
// (antialiasing); rows first, then columns, each pass rounded to 8 bits; weights are fixed-point with 22 fraction bits.
#pragma once

#include "moonpipe/data/image.h"

namespace moonpipe {

// `width` and `height` are positive. A side that does not change is not filtered. `plain` keeps to instructions that every machine has,
// with the same bytes.
RgbImage ResizeBicubic(const RgbImage& image, int32_t width, int32_t height, bool plain = false);

}  // namespace moonpipe
