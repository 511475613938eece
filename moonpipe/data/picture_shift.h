// Random shifts of training pictures: a small data set is seen at other places in every epoch. No state: the shift of a picture is a
// function of (seed, epoch, sample, picture), so that a replay makes the same bytes.
#pragma once

#include <cstdint>

#include "moonpipe/data/image_processor.h"

namespace moonpipe {

struct PictureShift {
  int32_t right = 0;  // pixels; negative moves left
  int32_t down = 0;
  bool operator==(const PictureShift&) const = default;
};

// Uniform over [-max_pixels, max_pixels] in both directions.
PictureShift DrawShift(uint64_t seed, uint64_t epoch, uint64_t sample, uint64_t picture, uint32_t max_pixels);

// The picture moved within its grid, all frames of a clip alike; what comes in from outside is 0, as padding is. `rule` is the one that
// cut it.
PicturePatches ShiftPicture(const PicturePatches& picture, const PictureShift& shift, const PictureRule& rule);

}  // namespace moonpipe
