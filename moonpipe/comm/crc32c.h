// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78, RFC 3720 appendix B.4): the checksum of every frame. On x86 with SSE 4.2 it
// runs in three interleaved streams of the crc32 instruction, elsewhere from tables; both give the same value.
//
//   uint32_t crc = Crc32c("123456789", 9);                        // 0xe3069283
//   crc = ExtendCrc32c(Crc32c(a, n), b, m);                       // equals the checksum of a followed by b
#pragma once

#include <cstddef>
#include <cstdint>

namespace moonpipe {

uint32_t ExtendCrc32c(uint32_t crc, const void* data, size_t bytes);
inline uint32_t Crc32c(const void* data, size_t bytes) { return ExtendCrc32c(0, data, bytes); }

namespace internal {
// The two ways apart, for tests. The hardware way falls back to tables where the processor lacks the instruction.
uint32_t ExtendCrc32cByTable(uint32_t crc, const void* data, size_t bytes);
bool HasCrc32cInstruction();
}  // namespace internal

}  // namespace moonpipe
