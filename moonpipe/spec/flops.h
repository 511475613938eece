// Model FLOPs of a step, counted from its manifest before it runs (architecture section 11.2). No tensors.
//
// A multiply-add is two FLOPs. Only work that the model itself demands counts: no recomputation, no padding, no
// optimizer, no norms, activations, rotary embeddings or table look-ups.
//   decoder    2 per token and weight of every matrix that the token meets: attention projections, router, the top-k
//              and the shared experts (not all of them), dense feed-forward, head. Plus causal attention,
//              2 * heads * (d_qk + d_v) per pair of query and visible key: the causal half, len^2 / 2 pairs of a
//              document of len tokens, documents apart.
//   vision     2 per patch and weight of patch embedding and blocks, plus full attention inside a picture: 4 * width
//              per block and pair of its n^2 patches. A clip of t frames is one picture of t * h * w patches.
//   projector  2 per feature row (merged position) and weight.
// Training multiplies the forward by 3 (forward, input gradient, weight gradient). A frozen part counts 1 if nothing
// ahead of it is trained (no gradient passes it), else 2. Counts are whole numbers and exact: a step of a large model
// exceeds 2^53 and 2^63.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/numeric/int128.h"
#include "moonpipe/data/v1/manifest.pb.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

// Parts without trained parameters. A decoder that is frozen in part is told by its layers.
struct FrozenParts {
  bool vision = false;
  bool projector = false;
  bool decoder = false;      // all of it; says nothing about `layers`, which must agree
  bool embedding = false;    // trained, it makes gradients pass through every layer
  bool head = false;
  std::vector<bool> layers = {};  // by decoder layer; empty: none is frozen
};

// A part is frozen when none of its tensors moves. `moves` says so for each of `tensors`, which is ListTensors of the whole
// model or what a test makes up; with tied embeddings the head moves with the embedding.
FrozenParts FindFrozenParts(const ModelConfig& config, const std::vector<TensorSpec>& tensors, const std::vector<bool>& moves);

struct StepFlops {
  absl::int128 vision = 0;
  absl::int128 projector = 0;
  absl::int128 decoder = 0;
  absl::int128 total() const { return vision + projector + decoder; }
};

// Weights of the matrices that one token meets in a decoder layer: with experts, the router, top-k and shared.
int64_t ActiveLayerWeights(const TextConfig& text, int64_t layer);
// The same over all layers and the head (the input embedding is a look-up).
int64_t ActiveDecoderWeights(const TextConfig& text);
// Weights that one patch meets in the tower; 411,747,840 for MoonViT.
int64_t VisionWeights(const VisionConfig& vision);
// Weights that one feature row meets in the projector.
int64_t ProjectorWeights(const ModelConfig& config);

// FLOPs of forward and backward over every microbatch of the manifest. Pictures count by their grids whether or not the
// model has a tower in this process; a model without a tower has no vision part.
StepFlops CountTrainingFlops(const ModelConfig& config, const data::v1::StepManifest& manifest,
                             const FrozenParts& frozen = {});

// The share of one part of the model; the shares of parts that make up the model add up to its count.
StepFlops CountTrainingFlops(const ModelConfig& config, const PartRange& range, const data::v1::StepManifest& manifest,
                             const FrozenParts& frozen = {});

}  // namespace moonpipe
