// What the tests of edges share.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "moonpipe/comm/edge.h"
#include "moonpipe/comm/socket_io.h"

namespace moonpipe {

// Long enough for any machine, short enough to end a broken test.
inline absl::Time Soon() { return absl::Now() + absl::Seconds(60); }
inline absl::Time In(int64_t milliseconds) { return absl::Now() + absl::Milliseconds(milliseconds); }

inline MessageHeader BytesHeader(int64_t bytes, uint32_t microbatch = 0) {
  return {.generation = 3, .step = 12, .microbatch = microbatch, .type = WireType::kUint8, .shape = {bytes}};
}

// Bytes that differ by position and seed.
inline std::shared_ptr<std::vector<uint8_t>> MakeBytes(int64_t bytes, uint32_t seed = 1) {
  auto data = std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(bytes));
  uint32_t state = seed * 2654435761u + 1;
  for (uint8_t& byte : *data) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return data;
}

inline Payload PayloadOf(const std::shared_ptr<std::vector<uint8_t>>& data) { return {data->data(), data->size(), data}; }

inline std::pair<UniqueFd, UniqueFd> SocketPair() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

}  // namespace moonpipe
