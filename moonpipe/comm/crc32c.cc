#include "moonpipe/comm/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace moonpipe {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;

// tables[k][b]: the state after byte b and k zero bytes, so that eight bytes cost eight independent look-ups.
using SliceTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr SliceTables MakeSliceTables() {
  SliceTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = state;
  }
  for (size_t slice = 1; slice < 8; ++slice) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr SliceTables kSlices = MakeSliceTables();

// On the raw state, without the inversions at both ends.
uint32_t UpdateByTable(uint32_t state, const uint8_t* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = kSlices[7][word & 0xff] ^ kSlices[6][(word >> 8) & 0xff] ^ kSlices[5][(word >> 16) & 0xff] ^
            kSlices[4][(word >> 24) & 0xff] ^ kSlices[3][(word >> 32) & 0xff] ^ kSlices[2][(word >> 40) & 0xff] ^
            kSlices[1][(word >> 48) & 0xff] ^ kSlices[0][word >> 56];
  }
  for (; bytes > 0; ++data, --bytes) state = (state >> 8) ^ kSlices[0][(state ^ *data) & 0xff];
  return state;
}

#if defined(__x86_64__)

// Appending zero bytes to a message is a linear map of the state; this is that map for a fixed count, as four look-ups.
class ZeroBytes {
 public:
  explicit ZeroBytes(size_t count) {
    std::array<uint32_t, 32> images{};
    for (size_t bit = 0; bit < 32; ++bit) {
      uint32_t state = uint32_t{1} << bit;
      for (size_t i = 0; i < count; ++i) state = (state >> 8) ^ kSlices[0][state & 0xff];
      images[bit] = state;
    }
    for (size_t position = 0; position < 4; ++position) {
      for (size_t byte = 0; byte < 256; ++byte) {
        uint32_t sum = 0;
        for (size_t bit = 0; bit < 8; ++bit) {
          if ((byte >> bit & 1) != 0) sum ^= images[8 * position + bit];
        }
        tables_[position][byte] = sum;
      }
    }
  }

  uint32_t operator()(uint32_t state) const {
    return tables_[0][state & 0xff] ^ tables_[1][(state >> 8) & 0xff] ^ tables_[2][(state >> 16) & 0xff] ^
           tables_[3][state >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> tables_;
};

// The instruction takes three cycles and one can start each cycle: three streams keep it busy. Long runs join rarely.
constexpr size_t kLongStream = 4096;
constexpr size_t kShortStream = 256;

__attribute__((target("sse4.2"))) inline uint64_t Step(uint64_t state, const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, 8);
  return _mm_crc32_u64(state, word);
}

template <size_t kStream>
__attribute__((target("sse4.2"))) uint32_t UpdateThreeStreams(uint32_t state, const uint8_t*& data, size_t& bytes,
                                                              const ZeroBytes& append_stream) {
  while (bytes >= 3 * kStream) {
    uint64_t first = state;
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      first = Step(first, data + i);
      second = Step(second, data + kStream + i);
      third = Step(third, data + 2 * kStream + i);
    }
    state = append_stream(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
    state = append_stream(state) ^ static_cast<uint32_t>(third);
    data += 3 * kStream;
    bytes -= 3 * kStream;
  }
  return state;
}

__attribute__((target("sse4.2"))) uint32_t UpdateByInstruction(uint32_t state, const uint8_t* data, size_t bytes) {
  static const ZeroBytes append_long(kLongStream);
  static const ZeroBytes append_short(kShortStream);
  state = UpdateThreeStreams<kLongStream>(state, data, bytes, append_long);
  state = UpdateThreeStreams<kShortStream>(state, data, bytes, append_short);
  uint64_t wide = state;
  for (; bytes >= 8; data += 8, bytes -= 8) wide = Step(wide, data);
  state = static_cast<uint32_t>(wide);
  for (; bytes > 0; ++data, --bytes) state = _mm_crc32_u8(state, *data);
  return state;
}

#endif

}  // namespace

namespace internal {

uint32_t ExtendCrc32cByTable(uint32_t crc, const void* data, size_t bytes) {
  return ~UpdateByTable(~crc, static_cast<const uint8_t*>(data), bytes);
}

bool HasCrc32cInstruction() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
#else
  return false;
#endif
}

}  // namespace internal

uint32_t ExtendCrc32c(uint32_t crc, const void* data, size_t bytes) {
#if defined(__x86_64__)
  if (internal::HasCrc32cInstruction()) return ~UpdateByInstruction(~crc, static_cast<const uint8_t*>(data), bytes);
#endif
  return internal::ExtendCrc32cByTable(crc, data, bytes);
}

}  // namespace moonpipe
