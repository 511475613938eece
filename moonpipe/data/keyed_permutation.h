// A shuffle without a buffer: a permutation of [0, n) drawn by a key, of which any element is computed by itself. A Feistel
// network permutes the next power of four, and results outside [0, n) are permuted again until they fall inside (cycle walking;
// at most 4 rounds on average).
#pragma once

#include <array>
#include <cstdint>

namespace moonpipe {

class KeyedPermutation {
 public:
  // `size` is at least 1. Equal (size, seed, epoch) give the same permutation on every machine.
  KeyedPermutation(uint64_t size, uint64_t seed, uint64_t epoch);

  // The element at `position` in [0, size).
  uint64_t At(uint64_t position) const;

 private:
  static constexpr int kRounds = 8;
  uint64_t Scramble(uint64_t value) const;

  uint64_t size_;
  int half_bits_;
  std::array<uint64_t, kRounds> keys_;
};

}  // namespace moonpipe
