// What a worker computes in a step that is compared with a recording: tensors that the model shows, by microbatch, and at the end the
// gradients. It goes to a file of the worker's own; tensors never pass the coordinator.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "moonpipe/model/observer.h"
#include "moonpipe/model/parameter_store.h"

namespace moonpipe {

class StepObservation {
 public:
  // Keeps what it is shown of this microbatch; the first time counts. Must not outlive the observation.
  TensorObserver OfMicrobatch(uint32_t microbatch);

  // Writes `out/NAME` for each tensor, the microbatches one after another along the first dimension, and `grad/NAME` for every published
  // gradient of the store; that of a tied embedding only where the part owns the embedding. Creates the folder. Errors of the file system
  // come back.
  absl::Status Write(const std::string& path, const ParameterStore& store) const;

 private:
  std::map<std::string, std::map<uint32_t, torch::Tensor>> seen_;
};

}  // namespace moonpipe
