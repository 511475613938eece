// Builds the two ends of a socket edge. The worker with the lower id listens and publishes where under EdgeAddressKey; the other
// waits for the key and dials. Equal boot ids mean one host: the dialer tries the Unix-domain socket first and takes TCP if that
// cannot be reached (two containers of one host); else TCP with TCP_NODELAY. Then both prove to each other that they are of the same run,
// plan and edge (edge_handshake.h).
//
// A stranger, or a peer that is refused, does not disturb the listener: it goes on accepting until the right peer comes or the
// deadline. Both calls block at most to the deadline, except for the name service when `advertise_host` is a name.
//
// Build edges in the same order on every worker (ascending by the plan): the dialer waits for its listener.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "moonpipe/comm/edge.h"
#include "moonpipe/comm/rendezvous.h"
#include "moonpipe/comm/socket_io.h"

namespace moonpipe {

struct EdgeEndpoint {
  // Unique within a plan, for example "activation.0".
  std::string name;
  // Id of the training run.
  std::string run;
  // Of the plan.
  uint64_t generation = 0;
  // Ids of the two workers; they differ.
  uint32_t self_worker = 0;
  uint32_t peer_worker = 0;
  // Secret of the plan; known to its workers alone.
  std::string token;
  // As in SocketEdgeOptions.
  uint64_t max_message_bytes = uint64_t{1} << 30;
  size_t capacity = 8;
  // Of this host's kernel (ReadBootId); empty means that no peer is on this host.
  std::string boot_id;
  // Where Unix sockets are made, removed once connected. Where it is empty or its path too long for a socket address (107 bytes),
  // the socket gets a name in the kernel's abstract space instead.
  std::string socket_folder;
  // Where TCP listens, on a port of the system's choice, and what peers are told to dial.
  std::string listen_host = "127.0.0.1";
  std::string advertise_host = "127.0.0.1";
  // No Unix socket even on one host.
  bool prefer_tcp = false;
  // Ends the building from another thread with its reason; may be null. Must outlive the call.
  Cancellation* cancellation = nullptr;
};

// From /proc/sys/kernel/random/boot_id; empty if it cannot be read.
std::string ReadBootId();

// "edge/<generation>/<name>"
std::string EdgeAddressKey(const EdgeEndpoint& endpoint);

// Each must be called by one of the two workers. Errors name the edge: DEADLINE_EXCEEDED (with the last refused peer, if any),
// UNAVAILABLE if the listener cannot be reached, ABORTED for a stale generation, PERMISSION_DENIED for a wrong token,
// FAILED_PRECONDITION for another run, edge, direction or protocol, INVALID_ARGUMENT for an endpoint that cannot be, and whatever
// the rendezvous or the cancellation gives.
absl::StatusOr<std::unique_ptr<SendEdge>> ConnectSendEdge(const EdgeEndpoint& endpoint, Rendezvous* rendezvous,
                                                          absl::Time deadline);
absl::StatusOr<std::unique_ptr<ReceiveEdge>> ConnectReceiveEdge(const EdgeEndpoint& endpoint, Rendezvous* rendezvous,
                                                                absl::Time deadline);

}  // namespace moonpipe
