// All parameters of one worker's part of the model, as leaves of the autograd graph.
//
// Routed experts of a layer are held as stacks: `...mlp.experts.gate_proj.weight` is one tensor [experts, out, in] whose slice e is
// the published `...mlp.experts.<e>.gate_proj.weight`. Everything else is held as published. Loading, saving, gradient norms and the
// optimizer work on published tensors through the slices; the model works on whole tensors.
//
//   ParameterStore store(config, range);
//   DrawFreshWeights(seed, store);                       // or LoadModelFolder(folder, store)
//   for (const Parameter& parameter : store.parameters())
//     for (size_t i = 0; i < parameter.published.size(); ++i) Use(parameter.published[i].name, parameter.PublishedGradient(i));
#pragma once

#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "moonpipe/model/compute_options.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

struct Parameter {
  std::string name;         // of the stack, or as published
  torch::Tensor value;      // a leaf; requires a gradient iff trainable
  bool trainable = true;    // false: a buffer such as e_score_correction_bias, always fp32
  std::vector<TensorSpec> published;  // one, or one per expert in the order of the stack's slices

  bool is_stack() const { return published.front().expert >= 0; }
  // Views of one published tensor. The gradient is undefined while the whole parameter has none.
  torch::Tensor PublishedValue(size_t index) const;
  torch::Tensor PublishedGradient(size_t index) const;
};

class ParameterStore {
 public:
  // Allocates the part's tensors and nothing else; the bytes are arbitrary until weights are drawn or loaded. Buffers are fp32.
  ParameterStore(const ModelConfig& config, const PartRange& range, torch::Dtype dtype = torch::kFloat, torch::Device device = torch::kCPU);
  ParameterStore(ParameterStore&&) = default;
  ParameterStore& operator=(ParameterStore&&) = default;

  const ModelConfig& config() const { return config_; }
  const PartRange& range() const { return range_; }
  // How modules built over this store compute; by default in the type of the parameters. Set it before they are built.
  const ComputeOptions& compute() const { return compute_; }
  void set_compute(const ComputeOptions& compute) { compute_ = compute; }

  // In canonical order; a stack stands where its first expert does.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // The published tensors in canonical order.
  const std::vector<TensorSpec>& specs() const { return specs_; }

  // A parameter by the name it is held under. The handle stays valid: values change in place only. Throws c10::Error if unknown.
  const torch::Tensor& Get(absl::string_view name) const;
  bool Has(absl::string_view name) const { return held_.find(name) != held_.end(); }

  // A published tensor as a view. Throws c10::Error if the part has no such tensor.
  torch::Tensor PublishedValue(absl::string_view name) const;
  torch::Tensor PublishedGradient(absl::string_view name) const;

  // Gives every trainable parameter a gradient of exact zeros.
  void ZeroGradients();

  // Tied embeddings: the head's own leaf over the storage of the embedding, so that embedding and head always have two gradients, in
  // one process as in two. Undefined where the model is not tied or the part has no head.
  const torch::Tensor& tied_head() const { return tied_head_; }
  // What the head multiplies by: its own weight, or tied_head().
  torch::Tensor HeadWeight() const;

  // Prefix of the decoder's names, "language_model.model." or "model.".
  const std::string& decoder_prefix() const { return decoder_prefix_; }

 private:
  struct Slice {
    size_t parameter = 0;
    size_t index = 0;
  };
  const Slice& FindSlice(absl::string_view name) const;

  ModelConfig config_;
  PartRange range_;
  ComputeOptions compute_;
  std::vector<TensorSpec> specs_;
  std::vector<Parameter> parameters_;
  std::map<std::string, size_t, std::less<>> held_;
  std::map<std::string, Slice, std::less<>> slices_;
  torch::Tensor tied_head_;
  std::string decoder_prefix_;
};

}  // namespace moonpipe
