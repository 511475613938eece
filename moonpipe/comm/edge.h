// An edge is one directed way of tensors between two workers: activations to the next stage, gradients back, features from the
// encoder, their gradients to it. NCCL between GPUs, framed sockets between CPUs, memory within a test, behind this interface.
//
// Every message begins with a frame that is checked before a byte of the tensor is used: generation, step, microbatch, kind,
// dtype, shape, byte count, checksum. A wrong or stale message is an error, never a silent mix-up. Every wait has a deadline and
// can be ended from another thread by Abort; after an error the edge is dead and must be built anew.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace moonpipe {

// Element types that travel. Values are part of the wire format.
enum class WireType : uint32_t { kFloat32 = 1, kBfloat16 = 2, kUint8 = 3, kInt32 = 4, kInt64 = 5 };
// 0 for a value that is none of them.
uint64_t WireTypeBytes(WireType type);

// What a message must be: the receiver knows it from the manifest before the message comes.
struct MessageHeader {
  uint64_t generation = 0;
  uint64_t step = 0;
  uint32_t microbatch = 0;
  WireType type = WireType::kFloat32;
  std::vector<int64_t> shape;

  // The largest uint64 if an extent is negative or the product overflows.
  uint64_t payload_bytes() const;
  // "generation 3 step 12 microbatch 1 float32[16, 64]"
  std::string ToString() const;
  bool operator==(const MessageHeader&) const = default;
};

// Contiguous bytes in host memory; `owner` keeps them alive.
struct Payload {
  const void* data = nullptr;
  uint64_t bytes = 0;
  std::shared_ptr<const void> owner;
};

// Bytes that passed since the edge was built; tensors apart from frames.
struct EdgeCounters {
  uint64_t payload_bytes = 0;
  uint64_t frame_bytes = 0;
  uint64_t messages = 0;
};

class SendEdge {
 public:
  virtual ~SendEdge() = default;
  // Hands a message to the edge and returns without waiting for the peer, unless `capacity` messages are under way already; then it
  // blocks to the deadline. The payload is kept alive until it is written. INVALID_ARGUMENT if the byte count differs from the
  // header's or is over the edge's limit (both numbers in the message); DEADLINE_EXCEEDED; ABORTED after Abort; UNAVAILABLE when
  // the peer is gone. Every message names the edge.
  virtual absl::Status Send(const MessageHeader& header, Payload payload, absl::Time deadline) = 0;
  // Blocks until all that was handed over has been written.
  virtual absl::Status Flush(absl::Time deadline) = 0;
  // Ends every wait, now and later, with this reason. Safe from any thread, more than once.
  virtual void Abort(const absl::Status& reason) = 0;
  virtual EdgeCounters counters() const = 0;
  virtual const std::string& name() const = 0;
  // unix, tcp, nccl or local.
  virtual std::string transport() const = 0;
};

class ReceiveEdge {
 public:
  virtual ~ReceiveEdge() = default;
  // Blocks for the next message, checks it against `expected`, and copies it to `destination`, which holds
  // expected.payload_bytes() bytes. FAILED_PRECONDITION if another message came (both in the text); DATA_LOSS on a bad checksum;
  // DEADLINE_EXCEEDED, ABORTED, UNAVAILABLE as for Send. The peer's messages are read ahead, at most `capacity` of them.
  virtual absl::Status Receive(const MessageHeader& expected, void* destination, absl::Time deadline) = 0;
  // True when a message has arrived or the edge has failed: Receive will not block.
  virtual bool Ready() const = 0;
  virtual void Abort(const absl::Status& reason) = 0;
  virtual EdgeCounters counters() const = 0;
  virtual const std::string& name() const = 0;
  virtual std::string transport() const = 0;
};

}  // namespace moonpipe
