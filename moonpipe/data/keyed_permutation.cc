#include "moonpipe/data/keyed_permutation.h"

namespace moonpipe {
namespace {

// A bijection of 64 bits in which every output bit depends on every input bit (multiply and xor-shift).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9FB21C651E98DF25u;
  x = (x ^ (x >> 28)) * 0xD6E8FEB86659FD93u;
  return x ^ (x >> 32);
}

}  // namespace

KeyedPermutation::KeyedPermutation(uint64_t size, uint64_t seed, uint64_t epoch) : size_(size), half_bits_(1) {
  while (half_bits_ < 32 && uint64_t{1} << (2 * half_bits_) < size) ++half_bits_;
  uint64_t key = Mix(Mix(seed + 0x9E3779B97F4A7C15u) + epoch);
  for (uint64_t& round_key : keys_) round_key = key = Mix(key + 0x9E3779B97F4A7C15u);
}

uint64_t KeyedPermutation::Scramble(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_, right = value & mask;
  for (const uint64_t key : keys_) {
    const uint64_t next = left ^ (Mix(right + key) & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

uint64_t KeyedPermutation::At(uint64_t position) const {
  uint64_t value = Scramble(position);
  while (value >= size_) value = Scramble(value);
  return value;
}

}  // namespace moonpipe
