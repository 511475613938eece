// fp32 values of weights whose checkpoint rounds them. The model's own parameters are the master weights (docs/adr/0004); a folder that
// came in bf16 or quantised is written back as it came, so the exact values of what trains lie beside the optimizer's state as
// `master.NAME`, and a resume is exact.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "moonpipe/model/hf_weights.h"
#include "moonpipe/model/parameter_store.h"
#include "moonpipe/spec/safetensors.h"
#include "moonpipe/train/parameter_groups.h"

namespace moonpipe {

// Of every tensor that can move (buffers too, which the rules call frozen) and that `form` rounds. `rules` has one entry a published
// tensor of the store. The bytes are the store's own and must be in host memory.
std::vector<StoredTensor> MasterWeights(const ParameterStore& store, const WeightForm& form, const std::vector<UpdateRule>& rules);

// Reads them into the store, whatever worker wrote them. A tensor without one keeps what the weights' own file said: it had not moved.
// INVALID_ARGUMENT for another shape or dtype, with both.
absl::Status LoadMasterWeights(const std::vector<SafetensorsFile>& files, const WeightForm& form, ParameterStore& store);

}  // namespace moonpipe
