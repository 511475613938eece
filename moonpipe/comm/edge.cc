#include "moonpipe/comm/edge.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace moonpipe {
namespace {

const char* WireTypeName(WireType type) {
  switch (type) {
    case WireType::kFloat32:
      return "float32";
    case WireType::kBfloat16:
      return "bfloat16";
    case WireType::kUint8:
      return "uint8";
    case WireType::kInt32:
      return "int32";
    case WireType::kInt64:
      return "int64";
  }
  return "unknown";
}

}  // namespace

uint64_t WireTypeBytes(WireType type) {
  switch (type) {
    case WireType::kFloat32:
    case WireType::kInt32:
      return 4;
    case WireType::kBfloat16:
      return 2;
    case WireType::kUint8:
      return 1;
    case WireType::kInt64:
      return 8;
  }
  return 0;
}

uint64_t MessageHeader::payload_bytes() const {
  uint64_t bytes = WireTypeBytes(type);
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes)) {
      return std::numeric_limits<uint64_t>::max();
    }
  }
  return bytes;
}

std::string MessageHeader::ToString() const {
  return absl::StrCat("generation ", generation, " step ", step, " microbatch ", microbatch, " ", WireTypeName(type), "[",
                      absl::StrJoin(shape, ", "), "]");
}

}  // namespace moonpipe
