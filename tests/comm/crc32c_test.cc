#include "moonpipe/comm/crc32c.h"

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace moonpipe {
namespace {

TEST(Crc32c, GivesThePublishedValues) {
  EXPECT_EQ(Crc32c("", 0), 0u);
  EXPECT_EQ(Crc32c("123456789", 9), 0xe3069283u);
  // RFC 3720, appendix B.4.
  EXPECT_EQ(Crc32c(std::string(32, '\0').data(), 32), 0x8a9136aau);
  EXPECT_EQ(Crc32c(std::string(32, '\xff').data(), 32), 0x62a8ab43u);
  std::string bytes;
  for (int i = 0; i < 32; ++i) bytes.push_back(static_cast<char>(i));
  EXPECT_EQ(Crc32c(bytes.data(), 32), 0x46dd794eu);
  EXPECT_EQ(Crc32c(std::string(bytes.rbegin(), bytes.rend()).data(), 32), 0x113fdb5cu);
}

TEST(Crc32c, TableAndInstructionAgreeAtEveryLengthAndAlignment) {
  std::mt19937_64 random(7);
  std::vector<uint8_t> bytes(3 * 4096 * 2 + 3 * 256 + 99);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  if (!internal::HasCrc32cInstruction()) GTEST_SKIP() << "this processor has no crc32 instruction";
  for (size_t offset : {0, 1, 3, 7}) {
    for (size_t length = 0; length < 1700; ++length) {
      ASSERT_EQ(ExtendCrc32c(5, bytes.data() + offset, length), internal::ExtendCrc32cByTable(5, bytes.data() + offset, length))
          << length << " bytes at offset " << offset;
    }
    const size_t rest = bytes.size() - offset;
    ASSERT_EQ(Crc32c(bytes.data() + offset, rest), internal::ExtendCrc32cByTable(0, bytes.data() + offset, rest));
  }
}

TEST(Crc32c, OfPartsIsThatOfTheWhole) {
  std::string text(40000, 'x');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 31 + i / 251);
  const uint32_t whole = Crc32c(text.data(), text.size());
  for (size_t cut : {1u, 112u, 12288u, 39999u}) {
    EXPECT_EQ(ExtendCrc32c(Crc32c(text.data(), cut), text.data() + cut, text.size() - cut), whole);
  }
}

}  // namespace
}  // namespace moonpipe
