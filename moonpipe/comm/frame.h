// The wire form of a message on an edge: header, payload, checksum. All numbers are little-endian.
//
//   offset bytes  field
//        0     4  magic "MPF1"
//        4     2  version, 1
//        6     2  header length, 112
//        8     8  generation
//       16     8  step
//       24     4  microbatch
//       28     4  element type (WireType)
//       32     4  rank, at most 8
//       36     4  zero
//       40     8  payload bytes, equal to the product of the shape times the element size
//       48    64  eight extents, those beyond the rank zero
//      112     n  payload
//    112+n     4  CRC-32C over header and payload
//
// The checksum follows the payload so that either end can compute it while the bytes pass.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "moonpipe/comm/edge.h"

namespace moonpipe {

inline constexpr size_t kFrameHeaderBytes = 112;
inline constexpr size_t kFrameTrailerBytes = 4;
// What a message costs on the wire beside its payload.
inline constexpr size_t kFrameBytes = kFrameHeaderBytes + kFrameTrailerBytes;
inline constexpr size_t kFrameMaxRank = 8;

using FrameHeader = std::array<uint8_t, kFrameHeaderBytes>;
using FrameTrailer = std::array<uint8_t, kFrameTrailerBytes>;

// INVALID_ARGUMENT if the type is unknown, the rank is over 8, an extent is negative, or the byte count does not fit 63 bits.
absl::StatusOr<FrameHeader> EncodeFrameHeader(const MessageHeader& header);

// DATA_LOSS if the bytes are no frame header or contradict themselves, FAILED_PRECONDITION for another version,
// RESOURCE_EXHAUSTED if the payload would be over `max_payload_bytes`; each with both numbers. It allocates nothing that depends on
// unchecked numbers.
absl::StatusOr<MessageHeader> ParseFrameHeader(absl::Span<const uint8_t> bytes, uint64_t max_payload_bytes);

FrameTrailer EncodeFrameTrailer(uint32_t crc);
// DATA_LOSS with both checksums if they differ.
absl::Status CheckFrameTrailer(const FrameTrailer& trailer, uint32_t crc);

}  // namespace moonpipe
