// A model's weights in every spelling and encoding that folders have, made by LibTorch's own operations from the published tensors: a
// second way to what spec/weight_layout and model/hf_weights do by rows.
//
//   StoredTensors stored = InLayout("native", published, config);
//   WriteTensorFile(folder + "/model.safetensors", {stored.begin(), stored.end()});
#pragma once

#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "moonpipe/spec/model_config.h"
#include "nlohmann/json.hpp"

namespace moonpipe::testing {

using StoredTensors = std::map<std::string, torch::Tensor>;

// All names that InLayout knows. Those that end in int4 or fp8 need ConfigInLayout.
std::vector<std::string> LayoutNames();

// `published` in the layout. Values of lossy layouts (bf16, int4, fp8) are rounded from them.
StoredTensors InLayout(const std::string& layout, const StoredTensors& published, const ModelConfig& config);

// What a load of the layout must give, as published fp32 tensors.
StoredTensors Decoded(const std::string& layout, const StoredTensors& published, const ModelConfig& config);

// config.json with the quantization_config that the layout needs.
nlohmann::json ConfigInLayout(const std::string& layout, nlohmann::json config);

}  // namespace moonpipe::testing
