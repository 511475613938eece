#include "moonpipe/model/quantised.h"

#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace moonpipe {
namespace {

constexpr int64_t kValuesPerWord = 8;
constexpr float kLargestFp8 = 448.0f;

float ReadScale(const char* scales, StoredType type, int64_t index) {
  if (type == StoredType::kF32) {
    float value = 0;
    std::memcpy(&value, scales + 4 * index, 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, scales + 2 * index, 2);
  if (type == StoredType::kF16) return static_cast<float>(c10::Half(bits, c10::Half::from_bits()));
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

const std::array<float, 256>& Fp8Values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (size_t i = 0; i < table.size(); ++i) {
      table[i] = static_cast<float>(c10::Float8_e4m3fn(static_cast<uint8_t>(i), c10::Float8_e4m3fn::from_bits()));
    }
    return table;
  }();
  return values;
}

}  // namespace

float RoundToBFloat16(float value) {
  if (std::isnan(value)) return value;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U);
}

void DecodeInt4Row(const Int4View& view, int64_t row, float* out) {
  const int64_t words = (view.columns + kValuesPerWord - 1) / kValuesPerWord;
  const int64_t groups = (view.columns + view.group_size - 1) / view.group_size;
  const char* packed = view.packed + 4 * row * words;
  std::array<float, 16> value{};
  for (int64_t group = 0; group < groups; ++group) {
    const float scale = ReadScale(view.scale, view.scale_type, row * groups + group);
    for (int nibble = 0; nibble < 16; ++nibble) value[static_cast<size_t>(nibble)] = RoundToBFloat16(static_cast<float>(nibble - 8) * scale);
    const int64_t end = std::min(view.columns, (group + 1) * view.group_size);
    for (int64_t column = group * view.group_size; column < end; ++column) {
      uint32_t word = 0;
      std::memcpy(&word, packed + column / kValuesPerWord * 4, 4);
      out[column] = value[(word >> (4 * (column % kValuesPerWord))) & 15U];
    }
  }
}

void EncodeInt4Row(const Int4View& view, int64_t row, const float* values, uint32_t* words) {
  const int64_t groups = (view.columns + view.group_size - 1) / view.group_size;
  std::fill_n(words, (view.columns + kValuesPerWord - 1) / kValuesPerWord, 0U);
  for (int64_t column = 0; column < view.columns; ++column) {
    const float scale = ReadScale(view.scale, view.scale_type, row * groups + column / view.group_size);
    const float quotient = scale == 0 ? 0 : std::nearbyint(values[column] / scale);
    const auto nibble = static_cast<uint32_t>(static_cast<int>(std::clamp(quotient, -8.0f, 7.0f)) + 8);
    words[column / kValuesPerWord] |= nibble << (4 * (column % kValuesPerWord));
  }
}

void DecodeFp8Row(const Fp8View& view, int64_t row, float* out) {
  const std::array<float, 256>& table = Fp8Values();
  const int64_t blocks = (view.columns + view.block_columns - 1) / view.block_columns;
  const auto* bytes = reinterpret_cast<const uint8_t*>(view.bytes) + row * view.columns;
  for (int64_t block = 0; block < blocks; ++block) {
    const float scale = ReadScale(view.scale, view.scale_type, row / view.block_rows * blocks + block);
    const int64_t end = std::min(view.columns, (block + 1) * view.block_columns);
    for (int64_t column = block * view.block_columns; column < end; ++column) out[column] = RoundToBFloat16(table[bytes[column]] * scale);
  }
}

void EncodeFp8Row(const Fp8View& view, int64_t row, const float* values, uint8_t* bytes) {
  const int64_t blocks = (view.columns + view.block_columns - 1) / view.block_columns;
  for (int64_t column = 0; column < view.columns; ++column) {
    const float scale = ReadScale(view.scale, view.scale_type, row / view.block_rows * blocks + column / view.block_columns);
    const float quotient = scale == 0 ? 0 : values[column] / scale;
    bytes[column] = c10::Float8_e4m3fn(std::clamp(quotient, -kLargestFp8, kLargestFp8)).x;
  }
}

}  // namespace moonpipe
