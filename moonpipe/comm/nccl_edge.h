// An edge between two GPUs: NCCL point to point over a communicator of its own, so that one edge can be aborted without the others.
// No frame travels: the shapes come from the manifest, and the generation is that of the communicator. The tensors are
// contiguous, on the edge's device, and equal in shape and dtype on both ends.
//
//   auto edge = MakeNcclEdge({.name = "activation.0", .generation = 3, .sends = true, .device = 0}, &rendezvous, deadline);
//   (*edge)->Send(hidden_TD, deadline);
//
// Messages name the edge. DEADLINE_EXCEEDED, UNAVAILABLE and the reason of Abort end the edge: its communicator is aborted, and it must
// be built anew.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "moonpipe/comm/edge.h"
#include "moonpipe/comm/rendezvous.h"

namespace at {
class Tensor;
}  // namespace at

namespace moonpipe {

struct NcclEdgeOptions {
  // Unique within a plan.
  std::string name;
  // Of the plan.
  uint64_t generation = 0;
  // True on the sending end.
  bool sends = false;
  // Index of the CUDA device.
  int device = 0;
  // A larger tensor is refused on both ends.
  uint64_t max_message_bytes = uint64_t{1} << 30;
  // Sends under way before Send blocks.
  size_t capacity = 8;
};

class NcclEdge {
 public:
  virtual ~NcclEdge() = default;
  // Enqueues the tensor behind the work of the current stream and returns, unless `capacity` sends are under way; then it waits for
  // the oldest. The tensor is kept alive until sent. INVALID_ARGUMENT on a receiving end, or for a tensor that does not fit.
  virtual absl::Status Send(const at::Tensor& tensor, absl::Time deadline) = 0;
  // Blocks until the tensor is filled.
  virtual absl::Status Receive(at::Tensor& tensor, absl::Time deadline) = 0;
  // Blocks until all sends are done.
  virtual absl::Status Flush(absl::Time deadline) = 0;
  // Safe from any thread, more than once. A wait sees it within a millisecond.
  virtual void Abort(const absl::Status& reason) = 0;
  // frame_bytes is 0.
  virtual EdgeCounters counters() const = 0;
  virtual const std::string& name() const = 0;
  // nccl
  virtual std::string transport() const = 0;
};

// Blocks until both ends have a communicator; the first Send or Receive may still take long, as NCCL connects lazily.
// INVALID_ARGUMENT if there is no such device; UNAVAILABLE if NCCL fails; whatever the rendezvous gives.
absl::StatusOr<std::unique_ptr<NcclEdge>> MakeNcclEdge(const NcclEdgeOptions& options, Rendezvous* rendezvous,
                                                       absl::Time deadline);

}  // namespace moonpipe
