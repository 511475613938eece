#include "moonpipe/comm/frame.h"

#include <cstring>
#include <limits>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/comm/crc32c.h"

namespace moonpipe {
namespace {

using ::testing::HasSubstr;

MessageHeader Example() {
  return {.generation = 3, .step = 12, .microbatch = 1, .type = WireType::kFloat32, .shape = {16, 64}};
}

constexpr uint64_t kLimit = 1 << 20;

template <typename T>
FrameHeader With(FrameHeader frame, size_t offset, T value) {
  std::memcpy(frame.data() + offset, &value, sizeof value);
  return frame;
}

TEST(Frame, SaysItselfInWords) {
  EXPECT_EQ(Example().ToString(), "generation 3 step 12 microbatch 1 float32[16, 64]");
  EXPECT_EQ(Example().payload_bytes(), 4096u);
  EXPECT_EQ((MessageHeader{.type = WireType::kBfloat16, .shape = {}}).payload_bytes(), 2u) << "a scalar";
  EXPECT_EQ((MessageHeader{.shape = {5, 0}}).payload_bytes(), 0u);
}

TEST(Frame, HasTheDocumentedBytes) {
  const FrameHeader frame = *EncodeFrameHeader(Example());
  EXPECT_EQ(std::string(frame.begin(), frame.begin() + 4), "MPF1");
  EXPECT_EQ(frame[4], 1);
  EXPECT_EQ(frame[6], 112);
  EXPECT_EQ(frame[8], 3);
  EXPECT_EQ(frame[16], 12);
  EXPECT_EQ(frame[24], 1);
  EXPECT_EQ(frame[28], 1);
  EXPECT_EQ(frame[32], 2);
  EXPECT_EQ(frame[41], 0x10) << "4096 in little-endian";
  EXPECT_EQ(frame[48], 16);
  EXPECT_EQ(frame[56], 64);
}

TEST(Frame, ComesBackAsItWas) {
  for (const MessageHeader& header :
       {Example(), MessageHeader{}, MessageHeader{.type = WireType::kInt64, .shape = {0, 7}},
        MessageHeader{std::numeric_limits<uint64_t>::max(), 1ull << 40, 0xffffffff, WireType::kUint8, {1, 2, 3, 4, 5, 6, 7, 8}}}) {
    const auto back = ParseFrameHeader(*EncodeFrameHeader(header), kLimit);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(*back, header);
  }
}

TEST(Frame, EncodingRefusesWhatNoFrameCanHold) {
  MessageHeader header = Example();
  header.shape = std::vector<int64_t>(9, 1);
  EXPECT_THAT(std::string(EncodeFrameHeader(header).status().message()), HasSubstr("rank 9 is over the 8"));
  header.shape = {-1};
  EXPECT_EQ(EncodeFrameHeader(header).status().code(), absl::StatusCode::kInvalidArgument);
  header.shape = {int64_t{1} << 40, int64_t{1} << 40};
  EXPECT_EQ(EncodeFrameHeader(header).status().code(), absl::StatusCode::kInvalidArgument);
  header = Example();
  header.type = static_cast<WireType>(77);
  EXPECT_EQ(EncodeFrameHeader(header).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Frame, ParsingRefusesEachContradictionWithBothNumbers) {
  const FrameHeader good = *EncodeFrameHeader(Example());
  const struct {
    FrameHeader frame;
    absl::StatusCode code;
    std::string words;
  } cases[] = {
      {With<uint32_t>(good, 0, 0x12345678), absl::StatusCode::kDataLoss, "frame begins with 0x12345678, not 0x3146504d"},
      {With<uint16_t>(good, 4, 2), absl::StatusCode::kFailedPrecondition, "frame has version 2, this program speaks 1"},
      {With<uint16_t>(good, 6, 120), absl::StatusCode::kDataLoss, "header of 120 bytes, not 112"},
      {With<uint32_t>(good, 28, 9), absl::StatusCode::kDataLoss, "unknown element type 9"},
      {With<uint32_t>(good, 32, 9), absl::StatusCode::kDataLoss, "rank 9, at most 8"},
      {With<uint32_t>(good, 32, 0xffffffff), absl::StatusCode::kDataLoss, "rank 4294967295, at most 8"},
      {With<uint32_t>(good, 36, 1), absl::StatusCode::kDataLoss, "where zero must be"},
      {With<uint64_t>(good, 40, 4095), absl::StatusCode::kDataLoss, "tells 4095 payload bytes but its shape makes 4096"},
      {With<int64_t>(good, 48, -16), absl::StatusCode::kDataLoss, "extent -16 in dimension 0"},
      {With<int64_t>(good, 48, int64_t{1} << 62), absl::StatusCode::kDataLoss, "overflows"},
      {With<int64_t>(good, 64, 1), absl::StatusCode::kDataLoss, "rank 2 has extent 1 in dimension 2"},
  };
  for (const auto& bad : cases) {
    const absl::Status status = ParseFrameHeader(bad.frame, kLimit).status();
    EXPECT_EQ(status.code(), bad.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.words));
  }
  const absl::Status oversize = ParseFrameHeader(good, 4095).status();
  EXPECT_EQ(oversize.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(oversize.message()), HasSubstr("message of 4096 bytes is over the limit of 4095 bytes"));
  EXPECT_EQ(ParseFrameHeader(absl::MakeSpan(good).subspan(0, 111), kLimit).status().code(), absl::StatusCode::kDataLoss);
}

TEST(Frame, NoMutatedMessageIsEverAccepted) {
  std::mt19937_64 random(20260101);
  MessageHeader header = Example();
  header.shape = {3, 5};
  const FrameHeader frame = *EncodeFrameHeader(header);
  std::string message(frame.begin(), frame.end());
  for (uint64_t i = 0; i < header.payload_bytes(); ++i) message.push_back(static_cast<char>(random()));
  const FrameTrailer trailer = EncodeFrameTrailer(Crc32c(message.data(), message.size()));
  message.append(trailer.begin(), trailer.end());

  // What a receiver does with the bytes.
  const auto accept = [](const std::string& bytes) {
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    const auto parsed = ParseFrameHeader({data, kFrameHeaderBytes}, kLimit);
    if (!parsed.ok() || parsed->payload_bytes() + kFrameBytes != bytes.size()) return false;
    FrameTrailer told;
    std::memcpy(told.data(), data + bytes.size() - kFrameTrailerBytes, kFrameTrailerBytes);
    return CheckFrameTrailer(told, Crc32c(data, bytes.size() - kFrameTrailerBytes)).ok();
  };
  ASSERT_TRUE(accept(message));
  for (int round = 0; round < 20000; ++round) {
    std::string mutated = message;
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < changes; ++i) {
      const size_t at = random() % 3 == 0 ? random() % kFrameHeaderBytes : random() % mutated.size();
      mutated[at] = random() % 2 == 0 ? static_cast<char>(random()) : static_cast<char>(mutated[at] ^ (1 << random() % 8));
    }
    ASSERT_EQ(accept(mutated), mutated == message) << "round " << round;
  }
}

}  // namespace
}  // namespace moonpipe
