// The one seam where exceptions of LibTorch become absl::Status. A target of its own (moonpipe::torch_status), so that base is free
// of torch.
//
//   return CatchTorch([&]() -> absl::StatusOr<torch::Tensor> { return tower.Forward(patches, grids); });
#pragma once

#include <exception>
#include <utility>

#include "absl/status/status.h"

namespace moonpipe {

// What the exception means: RESOURCE_EXHAUSTED for a failed allocation, INVALID_ARGUMENT for torch's value and index errors, INTERNAL
// for the rest. The message is the exception's own without its backtrace.
absl::Status StatusOfException(std::exception_ptr exception);

// Calls `work`, which returns absl::Status or absl::StatusOr; whatever it throws comes back as a Status.
template <typename Work>
auto CatchTorch(Work&& work) -> decltype(work()) {
  try {
    return std::forward<Work>(work)();
  } catch (...) {
    return StatusOfException(std::current_exception());
  }
}

}  // namespace moonpipe
