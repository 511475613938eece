// Every tensor of a model under its published name: the one list that loading, fresh weights, saving, parameter counts and the
// gradient norm share. No LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "moonpipe/spec/model_config.h"

namespace moonpipe {

enum class ModelPartKind { kVision, kProjector, kDecoder };

// How a fresh tensor is drawn; architecture sections 3.8 and 4.7.
enum class Initializer {
  kZeros,
  kOnes,
  kNormal,           // N(0, std)
  kTruncatedNormal,  // N(0, std) cut at +-cut
};

struct TensorSpec {
  std::string name;            // for example language_model.model.layers.1.mlp.experts.3.up_proj.weight
  std::vector<int64_t> shape;  // as published
  ModelPartKind part = ModelPartKind::kDecoder;
  int64_t layer = -1;      // decoder layer; -1 for embedding, final norm, head, vision and projector
  int64_t expert = -1;     // routed expert; -1 elsewhere
  bool trainable = true;   // false for e_score_correction_bias, a buffer
  Initializer initializer = Initializer::kZeros;
  double std = 0;
  double cut = 0;

  int64_t num_elements() const;
};

// All tensors in canonical order: vision tower, projector, embedding, layers, final norm, head; within a layer attention, norms,
// feed-forward, experts in order. A tied head is not listed: it is the embedding.
std::vector<TensorSpec> ListTensors(const ModelConfig& config);

// What a worker owns of the model.
struct PartRange {
  int64_t first_layer = 0;
  int64_t end_layer = 0;
  bool has_embedding = false;
  bool has_head = false;
  bool has_vision = false;
};

// The tensors of one worker, in canonical order. With tied embeddings the worker of the head also owns the embedding.
std::vector<TensorSpec> ListTensors(const ModelConfig& config, const PartRange& range);

struct ParameterCounts {
  int64_t vision = 0;
  int64_t projector = 0;
  int64_t decoder = 0;          // embedding and head included
  int64_t embedding = 0;        // of which input embedding
  int64_t head = 0;             // of which the head; 0 where it is the embedding
  int64_t routed_experts = 0;   // of which routed experts, all of them
  int64_t active_decoder = 0;   // of the decoder, used per token: routed experts count top-k of all
  int64_t total() const { return vision + projector + decoder; }
};
// Counts parameters and, as published totals do, the expert biases.
ParameterCounts CountParameters(const ModelConfig& config);

}  // namespace moonpipe
