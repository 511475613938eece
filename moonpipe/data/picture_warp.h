// Random moves of training pictures: a small data set is seen shifted, turned and scaled anew in every epoch. No state: the move of a
// picture is a function of (seed, epoch, sample, picture), so that a replay makes the same bytes. Pixels are made in whole numbers.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "moonpipe/data/image_processor.h"

namespace moonpipe {

// How far pictures may be moved; all zero leaves them as they are.
struct WarpLimits {
  uint32_t shift_pixels = 0;    // in each direction
  double rotation_degrees = 0;  // either way, about the centre
  double scale = 0;             // 0.1: from 1 / 1.1 to 1.1 of the size, about the centre
};

struct PictureWarp {
  int32_t right = 0;  // pixels; negative moves left
  int32_t down = 0;
  // Where a pixel of the result comes from, relative to the centre and before the shift, in 1/65536: source x = (m[0] x + m[1] y),
  // source y = (m[2] x + m[3] y).
  std::array<int64_t, 4> source = {65536, 0, 0, 65536};
  bool operator==(const PictureWarp&) const = default;
  // For the digest of a step: "warp 3 -1 65536 0 0 65536 ".
  std::string ToString() const;
};

// Uniform within the limits; the scale uniform in its logarithm.
PictureWarp DrawWarp(uint64_t seed, uint64_t epoch, uint64_t sample, uint64_t picture, const WarpLimits& limits);

// The picture moved within its grid, all frames of a clip alike, interpolated between the four nearest pixels; what comes in from
// outside is 0, as padding is. `rule` is the one that cut it.
PicturePatches WarpPicture(const PicturePatches& picture, const PictureWarp& warp, const PictureRule& rule);

}  // namespace moonpipe
