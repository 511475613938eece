// Quantised weights and back, a range of rows at a time: INT4 as compressed-tensors packs it and FP8 (e4m3) in scaled blocks
// (architecture section 10.5). Plain memory, no tensors; values need not be aligned.
#pragma once

#include <cstdint>
#include <string>

#include "moonpipe/spec/safetensors.h"

namespace moonpipe {

// Nearest bf16 value, ties to even, as a float. Quantised weights decode to these: what the packed form stands for is a bf16 weight.
float RoundToBFloat16(float value);

// A matrix [rows, columns] in 32-bit words of eight values along the columns, lowest nibble first; value = (nibble - 8) * scale of its
// group of columns.
struct Int4View {
  const char* packed = nullptr;  // [rows, ceil(columns / 8)] words
  const char* scale = nullptr;   // [rows, ceil(columns / group_size)], F32, BF16 or F16
  StoredType scale_type = StoredType::kBF16;
  int64_t columns = 0;
  int64_t group_size = 32;
};
// Writes row `row` to out[columns].
void DecodeInt4Row(const Int4View& view, int64_t row, float* out);
// Packs row `row` of view.scale's matrix into words[ceil(columns / 8)]: the nearest value that the scale allows, cut at -8 and 7. A row as
// decoded gives its own words back, where no scale is 0.
void EncodeInt4Row(const Int4View& view, int64_t row, const float* values, uint32_t* words);

// A matrix of e4m3 bytes with a scale for each block; value = byte * scale of its block.
struct Fp8View {
  const char* bytes = nullptr;  // [rows, columns]
  const char* scale = nullptr;  // [ceil(rows / block_rows), ceil(columns / block_columns)], F32 or BF16
  StoredType scale_type = StoredType::kF32;
  int64_t columns = 0;
  int64_t block_rows = 128;
  int64_t block_columns = 128;
};
void DecodeFp8Row(const Fp8View& view, int64_t row, float* out);
// Nearest e4m3 value, ties to even, cut at +-448. A row as decoded gives its own bytes back, where no scale is 0.
void EncodeFp8Row(const Fp8View& view, int64_t row, const float* values, uint8_t* bytes);

}  // namespace moonpipe
