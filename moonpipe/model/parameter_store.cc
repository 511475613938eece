#include "moonpipe/model/parameter_store.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace moonpipe {
namespace {

std::string HeldName(const TensorSpec& spec) {
  if (spec.expert < 0) return spec.name;
  return absl::StrReplaceAll(spec.name, {{absl::StrCat(".experts.", spec.expert, "."), ".experts."}});
}

}  // namespace

torch::Tensor Parameter::PublishedValue(size_t index) const {
  const torch::Tensor whole = value.detach();
  return is_stack() ? whole.select(0, static_cast<int64_t>(index)) : whole;
}

torch::Tensor Parameter::PublishedGradient(size_t index) const {
  const torch::Tensor& gradient = value.grad();
  return gradient.defined() && is_stack() ? gradient.select(0, static_cast<int64_t>(index)) : gradient;
}

ParameterStore::ParameterStore(const ModelConfig& config, const PartRange& range, torch::Dtype dtype, torch::Device device)
    : config_(config), range_(range), specs_(ListTensors(config, range)) {
  compute_.dtype = dtype;
  decoder_prefix_ = config.architecture == Architecture::kDeepseekV3 ? "model." : "language_model.model.";
  for (const TensorSpec& spec : specs_) {
    const std::string held = HeldName(spec);
    const auto [entry, is_new] = held_.try_emplace(held, parameters_.size());
    if (is_new) {
      parameters_.emplace_back();
      parameters_.back().name = held;
      parameters_.back().trainable = spec.trainable;
    }
    Parameter& parameter = parameters_[entry->second];
    slices_[spec.name] = {entry->second, parameter.published.size()};
    parameter.published.push_back(spec);
  }
  for (Parameter& parameter : parameters_) {
    std::vector<int64_t> shape = parameter.published.front().shape;
    if (parameter.is_stack()) shape.insert(shape.begin(), static_cast<int64_t>(parameter.published.size()));
    parameter.value = torch::empty(shape, torch::dtype(parameter.trainable ? dtype : torch::kFloat).device(device));
    parameter.value.set_requires_grad(parameter.trainable);
  }
  if (config.text.tie_word_embeddings && range.has_head) {
    tied_head_ = Get(decoder_prefix_ + "embed_tokens.weight").detach();
    tied_head_.set_requires_grad(true);
  }
}

const torch::Tensor& ParameterStore::Get(absl::string_view name) const {
  const auto found = held_.find(name);
  TORCH_CHECK(found != held_.end(), "this part of the model holds no parameter ", std::string(name));
  return parameters_[found->second].value;
}

const ParameterStore::Slice& ParameterStore::FindSlice(absl::string_view name) const {
  const auto found = slices_.find(name);
  TORCH_CHECK(found != slices_.end(), "this part of the model has no tensor ", std::string(name));
  return found->second;
}

torch::Tensor ParameterStore::PublishedValue(absl::string_view name) const {
  const Slice& slice = FindSlice(name);
  return parameters_[slice.parameter].PublishedValue(slice.index);
}

torch::Tensor ParameterStore::PublishedGradient(absl::string_view name) const {
  const Slice& slice = FindSlice(name);
  return parameters_[slice.parameter].PublishedGradient(slice.index);
}

void ParameterStore::ZeroGradients() {
  for (Parameter& parameter : parameters_) {
    if (parameter.trainable) parameter.value.mutable_grad() = torch::zeros_like(parameter.value);
  }
  if (tied_head_.defined()) tied_head_.mutable_grad() = torch::zeros_like(tied_head_);
}

torch::Tensor ParameterStore::HeadWeight() const {
  if (tied_head_.defined()) return tied_head_;
  return Get(config_.architecture == Architecture::kDeepseekV3 ? "lm_head.weight" : "language_model.lm_head.weight");
}

}  // namespace moonpipe
