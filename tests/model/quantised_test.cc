#include "moonpipe/model/quantised.h"

#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

using ::testing::ElementsAre;

uint16_t BFloat16(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }

TEST(QuantisedTest, Int4IsReadAsItIsPacked) {
  // One row of 40 columns in groups of 32: nibbles 0 to 15, 15 to 0, then 8 of the second group.
  const uint32_t words[] = {0x76543210U, 0xfedcba98U, 0x89abcdefU, 0x01234567U, 0xf8f8f8f8U};
  const uint16_t scales[] = {BFloat16(0.5f), BFloat16(-2.0f)};
  Int4View view;
  view.packed = reinterpret_cast<const char*>(words);
  view.scale = reinterpret_cast<const char*>(scales);
  view.columns = 40;
  std::vector<float> out(40);
  DecodeInt4Row(view, 0, out.data());
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(out[static_cast<size_t>(i)], static_cast<float>(i - 8) * 0.5f) << i;
    EXPECT_EQ(out[static_cast<size_t>(16 + i)], static_cast<float>(7 - i) * 0.5f) << i;
  }
  EXPECT_THAT(std::vector<float>(out.begin() + 32, out.end()), ElementsAre(0, -14, 0, -14, 0, -14, 0, -14));
  std::array<uint32_t, 5> again{};
  EncodeInt4Row(view, 0, out.data(), again.data());
  EXPECT_THAT(again, ElementsAre(words[0], words[1], words[2], words[3], words[4]));
}

TEST(QuantisedTest, Int4ValuesAreBFloat16) {
  // 7 * 1.0078125 = 7.0546875 lies between the bf16 neighbours 7.03125 and 7.0625.
  const uint32_t word = 0x8888888fU;
  const uint16_t scale = BFloat16(1.0078125f);
  Int4View view;
  view.packed = reinterpret_cast<const char*>(&word);
  view.scale = reinterpret_cast<const char*>(&scale);
  view.columns = 8;
  std::vector<float> out(8);
  DecodeInt4Row(view, 0, out.data());
  EXPECT_EQ(out[0], 7.0625f);
}

TEST(QuantisedTest, Int4RoundsToTheNearestAndCuts) {
  const uint16_t scale = BFloat16(0.25f);
  Int4View view;
  view.scale = reinterpret_cast<const char*>(&scale);
  view.columns = 8;
  const float values[] = {0.37f, 0.38f, -5, 5, 0.0f, -0.26f, 1.75f, -2};
  uint32_t word = 0;
  EncodeInt4Row(view, 0, values, &word);
  std::vector<int> nibbles;
  for (int i = 0; i < 8; ++i) nibbles.push_back(static_cast<int>(word >> (4 * i) & 15U) - 8);
  EXPECT_THAT(nibbles, ElementsAre(1, 2, -8, 7, 0, -1, 7, -8));
}

TEST(QuantisedTest, EveryFp8ValueOfEveryBlockComesBack) {
  // 3 rows of blocks of 2 x 100 columns: four scales.
  constexpr int64_t kColumns = 150;
  std::vector<uint8_t> bytes(3 * kColumns);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>((i * 7) % 256 % 127 + (i % 2) * 128);  // no NaN
  const float scales[] = {0.013f, 1.0f, 3.7f, 1e-4f};
  Fp8View view;
  view.bytes = reinterpret_cast<const char*>(bytes.data());
  view.scale = reinterpret_cast<const char*>(scales);
  view.columns = kColumns;
  view.block_rows = 2;
  view.block_columns = 100;
  for (int64_t row = 0; row < 3; ++row) {
    std::vector<float> out(kColumns);
    DecodeFp8Row(view, row, out.data());
    for (int64_t column = 0; column < kColumns; ++column) {
      const uint8_t byte = bytes[static_cast<size_t>(row * kColumns + column)];
      // Sign, four bits of exponent with bias 7, three of mantissa; exponent 0 is subnormal.
      const int exponent = byte >> 3 & 15, mantissa = byte & 7;
      const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9) : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      const float scale = scales[row / 2 * 2 + column / 100];
      EXPECT_EQ(out[static_cast<size_t>(column)], RoundToBFloat16((byte & 128 ? -magnitude : magnitude) * scale)) << int{byte};
    }
    std::vector<uint8_t> again(kColumns);
    EncodeFp8Row(view, row, out.data(), again.data());
    EXPECT_EQ(again, std::vector<uint8_t>(bytes.begin() + row * kColumns, bytes.begin() + (row + 1) * kColumns));
  }
}

TEST(QuantisedTest, Fp8IsCutAtItsLargestValue) {
  const float scale = 1;
  Fp8View view;
  view.scale = reinterpret_cast<const char*>(&scale);
  view.columns = 2;
  const float values[] = {1e6f, -1e6f};
  std::array<uint8_t, 2> bytes{};
  EncodeFp8Row(view, 0, values, bytes.data());
  EXPECT_THAT(bytes, ElementsAre(0x7e, 0xfe));
}

TEST(QuantisedTest, BFloat16RoundsTiesToEven) {
  EXPECT_EQ(RoundToBFloat16(1.00390625f), 1.0f);        // half way, even below
  EXPECT_EQ(RoundToBFloat16(1.01171875f), 1.015625f);   // half way, even above
  EXPECT_EQ(RoundToBFloat16(-1.005f), -1.0078125f);
  EXPECT_TRUE(std::isnan(RoundToBFloat16(NAN)));
  EXPECT_EQ(RoundToBFloat16(INFINITY), INFINITY);
}

}  // namespace
}  // namespace moonpipe
