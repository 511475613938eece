// Which decoder layers each stage owns. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

// What the parts of the decoder cost per token: weights that a token meets, so that a dense layer and a layer of
// experts weigh what they compute and not what they store. The embedding is a look-up and weighs one row; the head
// weighs the whole vocabulary.
struct SplitCosts {
  double embedding = 0;
  double head = 0;
  std::vector<double> layers;
};
SplitCosts CostsOf(const ModelConfig& config);

// Cuts the layers into `stages` runs so that the costliest stage is as cheap as can be, and among those cuts the one
// whose costs lie closest together. Stage 0 carries the embedding, the last the head; every stage has at least one
// layer, and counts may differ. INVALID_ARGUMENT with both numbers when there are more stages than layers, or none.
absl::StatusOr<std::vector<PartRange>> SplitLayers(const SplitCosts& costs, int32_t stages);

// Takes the counts of layers as they are. INVALID_ARGUMENT with both numbers when they are not one a stage, when one is
// zero, or when their sum is not `num_layers`.
absl::StatusOr<std::vector<PartRange>> SplitLayersAs(const std::vector<uint32_t>& layers_per_stage, int64_t num_layers,
                                                     int32_t stages);

}  // namespace moonpipe
