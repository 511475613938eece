#include "moonpipe/comm/frame.h"

#include <bit>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are written as they lie in memory");

constexpr uint32_t kMagic = 0x3146504d;  // "MPF1"
constexpr uint16_t kVersion = 1;

template <typename T>
void Put(FrameHeader& frame, size_t offset, T value) {
  std::memcpy(frame.data() + offset, &value, sizeof value);
}

template <typename T>
T Get(absl::Span<const uint8_t> frame, size_t offset) {
  T value;
  std::memcpy(&value, frame.data() + offset, sizeof value);
  return value;
}

std::string Hex(uint32_t value) { return absl::StrCat("0x", absl::Hex(value, absl::kZeroPad8)); }

}  // namespace

absl::StatusOr<FrameHeader> EncodeFrameHeader(const MessageHeader& header) {
  if (WireTypeBytes(header.type) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("element type ", static_cast<uint32_t>(header.type), " is unknown"));
  }
  if (header.shape.size() > kFrameMaxRank) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", header.shape.size(), " is over the ", kFrameMaxRank, " that a frame holds"));
  }
  const uint64_t bytes = header.payload_bytes();
  if (bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return absl::InvalidArgumentError(
        absl::StrCat(header.ToString(), " has a negative extent or more bytes than 63 bits can count"));
  }
  FrameHeader frame{};
  Put(frame, 0, kMagic);
  Put(frame, 4, kVersion);
  Put(frame, 6, static_cast<uint16_t>(kFrameHeaderBytes));
  Put(frame, 8, header.generation);
  Put(frame, 16, header.step);
  Put(frame, 24, header.microbatch);
  Put(frame, 28, static_cast<uint32_t>(header.type));
  Put(frame, 32, static_cast<uint32_t>(header.shape.size()));
  Put(frame, 40, bytes);
  for (size_t i = 0; i < header.shape.size(); ++i) Put(frame, 48 + 8 * i, header.shape[i]);
  return frame;
}

absl::StatusOr<MessageHeader> ParseFrameHeader(absl::Span<const uint8_t> bytes, uint64_t max_payload_bytes) {
  if (bytes.size() != kFrameHeaderBytes) {
    return absl::DataLossError(absl::StrCat("frame header has ", bytes.size(), " bytes, not ", kFrameHeaderBytes));
  }
  if (Get<uint32_t>(bytes, 0) != kMagic) {
    return absl::DataLossError(absl::StrCat("frame begins with ", Hex(Get<uint32_t>(bytes, 0)), ", not ", Hex(kMagic)));
  }
  if (Get<uint16_t>(bytes, 4) != kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("frame has version ", Get<uint16_t>(bytes, 4), ", this program speaks ",
                                                      kVersion, "; run the same release on every worker"));
  }
  if (Get<uint16_t>(bytes, 6) != kFrameHeaderBytes) {
    return absl::DataLossError(
        absl::StrCat("frame tells a header of ", Get<uint16_t>(bytes, 6), " bytes, not ", kFrameHeaderBytes));
  }
  MessageHeader header;
  header.generation = Get<uint64_t>(bytes, 8);
  header.step = Get<uint64_t>(bytes, 16);
  header.microbatch = Get<uint32_t>(bytes, 24);
  header.type = static_cast<WireType>(Get<uint32_t>(bytes, 28));
  if (WireTypeBytes(header.type) == 0) {
    return absl::DataLossError(absl::StrCat("frame has the unknown element type ", Get<uint32_t>(bytes, 28)));
  }
  const uint32_t rank = Get<uint32_t>(bytes, 32);
  if (rank > kFrameMaxRank) {
    return absl::DataLossError(absl::StrCat("frame has rank ", rank, ", at most ", kFrameMaxRank, " is allowed"));
  }
  if (Get<uint32_t>(bytes, 36) != 0) {
    return absl::DataLossError(absl::StrCat("frame has ", Hex(Get<uint32_t>(bytes, 36)), " where zero must be"));
  }
  for (size_t i = 0; i < kFrameMaxRank; ++i) {
    const int64_t extent = Get<int64_t>(bytes, 48 + 8 * i);
    if (i < rank && extent < 0) {
      return absl::DataLossError(absl::StrCat("frame has extent ", extent, " in dimension ", i));
    }
    if (i >= rank && extent != 0) {
      return absl::DataLossError(absl::StrCat("frame of rank ", rank, " has extent ", extent, " in dimension ", i));
    }
    if (i < rank) header.shape.push_back(extent);
  }
  const uint64_t told = Get<uint64_t>(bytes, 40);
  const uint64_t payload_bytes = header.payload_bytes();
  if (payload_bytes == std::numeric_limits<uint64_t>::max()) {
    return absl::DataLossError(absl::StrCat("frame tells ", told, " payload bytes but its shape overflows: ", header.ToString()));
  }
  if (told != payload_bytes) {
    return absl::DataLossError(absl::StrCat("frame tells ", told, " payload bytes but its shape makes ", payload_bytes, ": ",
                                            header.ToString()));
  }
  if (told > max_payload_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("message of ", told, " bytes is over the limit of ", max_payload_bytes,
                                                     " bytes: ", header.ToString()));
  }
  return header;
}

FrameTrailer EncodeFrameTrailer(uint32_t crc) {
  FrameTrailer trailer;
  std::memcpy(trailer.data(), &crc, sizeof crc);
  return trailer;
}

absl::Status CheckFrameTrailer(const FrameTrailer& trailer, uint32_t crc) {
  uint32_t told;
  std::memcpy(&told, trailer.data(), sizeof told);
  if (told == crc) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("checksum is ", Hex(crc), " but the frame tells ", Hex(told)));
}

}  // namespace moonpipe
