// Groups of c10d's process groups. On CPUs it is Gloo: one device (an event loop and its thread) per process and host address, one
// thread per group. The tensors live on the CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "moonpipe/comm/group.h"
#include "moonpipe/comm/rendezvous.h"

namespace moonpipe {

struct GroupOptions {
  // Unique within a plan, for example "replicas.0".
  std::string name;
  // Of the plan.
  uint64_t generation = 0;
  int rank = 0;
  int size = 1;
  // Address (or its name) of this worker at which the other members reach it.
  std::string host = "127.0.0.1";
};

// Blocks until all members are connected. INVALID_ARGUMENT for a rank outside the size; DEADLINE_EXCEEDED or UNAVAILABLE if a member
// does not come. Build groups in the same order on every worker. The destructor does not wait for an operation that never ended: nothing ends a wait
// within Gloo but its timeout, so its thread and the tensors of that operation live on to the operation's deadline, at most one
// hour, which is also the longest that any operation may take.
absl::StatusOr<std::unique_ptr<Group>> MakeGlooGroup(const GroupOptions& options, Rendezvous* rendezvous, absl::Time deadline);

}  // namespace moonpipe
