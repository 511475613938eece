// The two ends of an edge over a connected stream socket (Unix-domain or TCP). The sender has one writer thread, the receiver one
// reader thread; the calling threads only wait on queues, so every wait can be aborted and has its deadline.
//
//   caller --Send--> queue (capacity) --writer--> socket --reader--> queue (capacity) --Receive--> caller's memory
//
// The writer checksums and writes the payload straight from its owner's memory. The reader checks the frame, reads into a pool of
// buffers that it reuses, or straight into the caller's memory where Receive already waits for just this message, and checks the
// checksum before anyone is told. Memory of the receiver: at most `capacity` payloads.
//
// Errors name the edge. INVALID_ARGUMENT leaves the edge usable (nothing was sent or read). Everything else, a deadline included,
// ends the edge: the socket is shut down, the peer sees UNAVAILABLE, and all later calls give the first error.
//   UNAVAILABLE         peer has closed the connection or died. What had fully arrived before is still given by Receive.
//   DEADLINE_EXCEEDED   the message says what was waited for, for how long, and how much of it had come or gone.
//   RESOURCE_EXHAUSTED  the peer announces a message over `max_message_bytes` (both sizes), or no memory for it.
//   DATA_LOSS           bad frame or checksum.
//   FAILED_PRECONDITION another message than the expected one (both in the text).
//   The reason of Abort on this end, at once and before any message that has arrived.
// Destructors stop the threads; unwritten messages are dropped, so Flush first.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "moonpipe/comm/edge.h"
#include "moonpipe/comm/socket_io.h"

namespace moonpipe {

struct SocketEdgeOptions {
  // Name of the edge, for example "activation.0".
  std::string name;
  // "unix" or "tcp": what transport() tells.
  std::string transport = "unix";
  // A larger payload is refused on both ends.
  uint64_t max_message_bytes = uint64_t{1} << 30;
  // Messages in the queue of either end, at least 1.
  size_t capacity = 8;
};

// Takes over a connected stream socket. INVALID_ARGUMENT for a capacity of 0 or a bad descriptor; RESOURCE_EXHAUSTED without a
// thread or descriptor left.
absl::StatusOr<std::unique_ptr<SendEdge>> MakeSocketSendEdge(UniqueFd socket, const SocketEdgeOptions& options);
absl::StatusOr<std::unique_ptr<ReceiveEdge>> MakeSocketReceiveEdge(UniqueFd socket, const SocketEdgeOptions& options);

}  // namespace moonpipe
