// Weights between a Hugging Face model folder and a part of the model. Published names and shapes; the folder's dtype and its spelling
// of the projector's names are remembered, so that a save can write what was read.
#pragma once

#include <torch/torch.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "moonpipe/model/parameter_store.h"
#include "moonpipe/spec/safetensors.h"

namespace moonpipe {

// How a folder stores one tensor.
struct PublishedForm {
  std::string name;  // as the folder spells it
  StoredType type = StoredType::kF32;
};
// By canonical name (TensorSpec::name).
using PublishedForms = std::map<std::string, PublishedForm>;

// The other spelling of a projector's tensor: multi_modal_projector.linear_1.weight <-> mm_projector.proj.0.weight. Empty for other names.
std::string OtherProjectorSpelling(absl::string_view name);

// Reads the part's tensors (and only their bytes) from model.safetensors or from the shards of model.safetensors.index.json into the
// store, converting F32, BF16 and F16 to the store's dtype. The names of the whole folder are checked against the whole model first:
// INVALID_ARGUMENT lists every missing, unknown and misshaped tensor (the first twenty of each kind) with both shapes. Rotary tables
// (`rotary_emb.inv_freq`) are skipped. On an error the store's values are not to be used.
absl::StatusOr<PublishedForms> LoadModelFolder(const std::string& folder, ParameterStore& store);

// One stored tensor as a host tensor that owns its bytes. INVALID_ARGUMENT for a dtype without a torch counterpart.
absl::StatusOr<torch::Tensor> ToTorch(const StoredTensor& stored);

// Writes tensors (any device; made contiguous) under the given names and with their own dtypes; returns the file's size. Errors are
// those of WriteSafetensors.
absl::StatusOr<uint64_t> WriteTensorFile(const std::string& path, const std::vector<std::pair<std::string, torch::Tensor>>& tensors,
                                         const std::map<std::string, std::string>& metadata = {});

// The torch dtype of a stored type and back. INVALID_ARGUMENT where there is none.
absl::StatusOr<torch::Dtype> ToTorchType(StoredType type);
absl::StatusOr<StoredType> ToStoredType(torch::Dtype dtype);

}  // namespace moonpipe
