// A picture in memory.
#pragma once

#include <cstdint>
#include <vector>

namespace moonpipe {

struct RgbImage {
  int32_t width = 0;
  int32_t height = 0;
  std::vector<uint8_t> pixels;  // [height, width, 3]
};

}  // namespace moonpipe
