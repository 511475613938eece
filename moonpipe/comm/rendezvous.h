// An abstract key/value channel to the coordinator through which edges and groups find each other. The runtime implements it over
// the worker's stream, tests in memory, so that this folder knows no gRPC.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace moonpipe {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual absl::Status Set(const std::string& key, const std::string& value) = 0;
  // Blocks until the key is set. DEADLINE_EXCEEDED names the key; ABORTED when the plan is over.
  virtual absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) = 0;
};

}  // namespace moonpipe
