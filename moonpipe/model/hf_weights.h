// Weights between a Hugging Face model folder and a part of the model, in the folder's own spelling, dtypes and encoding
// (spec/weight_layout.h): a load normalises, and a save writes what was read back the same way, byte for byte where nothing changed.
//
//   MOONPIPE_ASSIGN_OR_RETURN(WeightForm form, LoadModelFolder(folder, store));     // or FreshForm(store)
//   MOONPIPE_ASSIGN_OR_RETURN(WrittenWeights written, WriteWeights(path, store, form));
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
#include "moonpipe/spec/weight_layout.h"

namespace moonpipe {

// What is kept of a quantised tensor besides its values: its scales as they were stored.
struct KeptScales {
  StoredType type = StoredType::kBF16;
  std::vector<int64_t> shape;
  std::string bytes;
  StoredType shape_type = StoredType::kI32;  // INT4: of the tensor `_shape`
};

// How a part's weights are written.
struct WeightForm {
  // The stored tensors that this part writes. With tied embeddings the embedding is the first stage's to write.
  WeightLayout layout;
  // By StoredWeight::name, for those that stay quantised.
  std::map<std::string, KeptScales> scales;
  Quantization quantization;

  // Whether a save holds the fp32 value of this canonical tensor in full. Where it does not, a checkpoint needs the value beside it.
  bool HoldsInFull(const std::string& tensor) const { return rounded_.find(tensor) == rounded_.end(); }
  void MarkRounded(const std::string& tensor) { rounded_.emplace(tensor, true); }

 private:
  std::map<std::string, bool> rounded_;
};

// Fresh weights: published names, F32.
WeightForm FreshForm(const ParameterStore& store);

struct LoadOptions {
  // Quantised tensors are written quantised again, with the scales that they were loaded with; otherwise they are written as bf16.
  bool keep_quantised = false;
};

// Reads the part's tensors, and of the files only their pages (through a memory map), into the store; INT4 and FP8 are decoded on the
// way, a few rows at a time. The names of the whole folder are checked first, whatever the part; errors are those of ModelFolder::Open
// and DetectLayout, and INVALID_ARGUMENT for a stored head that differs from the embedding it is tied to. On an error the store's values
// are not to be used.
absl::StatusOr<WeightForm> LoadModelFolder(const std::string& folder, ParameterStore& store, const LoadOptions& options = {});

struct WrittenWeights {
  uint64_t file_bytes = 0;
  uint64_t tensor_bytes = 0;
  std::vector<std::string> names;  // of the tensors in the file
};
// Writes the part's tensors as `form` says, one at a time: besides the store only the largest stored tensor is in memory. Errors are those
// of WriteSafetensors.
absl::StatusOr<WrittenWeights> WriteWeights(const std::string& path, const ParameterStore& store, const WeightForm& form,
                                            const std::map<std::string, std::string>& metadata = {});

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
