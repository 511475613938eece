// A group is a fixed set of processes that compute sums and gathers together: the replicas of a stage, the parts of a sharded layer.
// All members call the same operations in the same order with equal shapes and dtypes; each call blocks until this member's part
// is done.
//
//   MOONPIPE_ASSIGN_OR_RETURN(auto group, MakeGlooGroup({.name = "replicas.0", .rank = 1, .size = 2}, &rendezvous, deadline));
//   MOONPIPE_RETURN_IF_ERROR(group->AllReduceOrdered(gradient, deadline));
//
// Errors name the group: INVALID_ARGUMENT (nothing was done, the group stays usable), and, after which the group is dead and must
// be built anew: DEADLINE_EXCEEDED, ABORTED or whatever Abort gave, UNAVAILABLE when a member is gone. After such an error
// the contents of the output are undefined, and may change until the group is destroyed.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace at {
class Tensor;
}  // namespace at

namespace moonpipe {

class Group {
 public:
  virtual ~Group() = default;

  // Member `rank` of 0 .. size - 1.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  // gloo or nccl.
  virtual std::string transport() const = 0;

  // output[r] = input of member r. `output` has the dtype of `input`, a leading extent of size(), and is contiguous, as is `input`.
  virtual absl::Status AllGather(const at::Tensor& input, at::Tensor& output, absl::Time deadline) = 0;
  // In place, contiguous. The order of the additions is the transport's: the bits may change with size().
  virtual absl::Status AllReduceSum(at::Tensor& tensor, absl::Time deadline) = 0;
  // In place, contiguous. Adds neighbours in pairs, then the pairs' sums in pairs: ((0+1)+(2+3))+4. Every member gets the same bits,
  // and a tree of 2^k leaves gives the same bits when 2^j of its leaves each are summed beforehand in this order. Moves size() times the bytes
  // of a gather; needs size() x 16 MiB of memory at most.
  virtual absl::Status AllReduceOrdered(at::Tensor& tensor, absl::Time deadline) = 0;
  // output = slice rank() of the sum of all inputs. `input` has size() times the elements of `output`; both contiguous.
  virtual absl::Status ReduceScatterSum(const at::Tensor& input, at::Tensor& output, absl::Time deadline) = 0;
  // Returns when all members have called it.
  virtual absl::Status Barrier(absl::Time deadline) = 0;

  // Ends the running and every later call with this reason. Safe from any thread, more than once.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace moonpipe
