// An edge within one process, for tests of what stands above edges: the same checks and errors as a socket edge, no socket, no
// thread, and faults on demand.
//
//   auto ends = MakeInProcessEdge("activation.0", {});
//   auto broken = MakeInProcessEdge("gradient.0", {.faults = {.drop_after_messages = 3}});
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "moonpipe/comm/edge.h"

namespace moonpipe {

// Messages are counted from 0 in the order of Send.
struct EdgeFaults {
  // The connection is gone once so many messages have passed: UNAVAILABLE on both ends.
  std::optional<uint64_t> drop_after_messages = std::nullopt;
  // This byte of this message's payload is flipped on the way: DATA_LOSS at the receiver.
  struct Corrupt {
    uint64_t message = 0;
    uint64_t byte = 0;
  };
  std::optional<Corrupt> corrupt = std::nullopt;
  // Nothing arrives before InProcessEdge::release.
  bool hold = false;
  // Changes the header on the way: FAILED_PRECONDITION at the receiver.
  std::function<void(uint64_t message, MessageHeader& header)> rewrite_header = nullptr;
};

struct InProcessEdgeOptions {
  uint64_t max_message_bytes = uint64_t{1} << 30;
  // Messages between the ends.
  size_t capacity = 8;
  EdgeFaults faults = {};
};

struct InProcessEdge {
  std::unique_ptr<SendEdge> sender;
  std::unique_ptr<ReceiveEdge> receiver;
  // Lets arrive what EdgeFaults::hold holds back. May be called from any thread, also after the ends are gone.
  std::function<void()> release;
};

// transport() is "local". Send copies the payload, so Flush never waits. Destroying an end closes the connection.
InProcessEdge MakeInProcessEdge(const std::string& name, const InProcessEdgeOptions& options);

}  // namespace moonpipe
