#include "moonpipe/train/gradients.h"

#include <torch/torch.h>

namespace moonpipe {

GradientAccumulator::GradientAccumulator(ParameterStore* store, uint32_t groups) : store_(store) {
  for (const Parameter& parameter : store_->parameters()) {
    if (parameter.value.requires_grad()) parameters_.push_back(parameter.value);
  }
  if (store_->tied_head().defined() && store_->tied_head().requires_grad()) parameters_.push_back(store_->tied_head());
  gradients_.resize(groups);
  for (auto& group : gradients_) {
    for (const torch::Tensor& parameter : parameters_) group.push_back(torch::zeros_like(parameter));
  }
  Select(0);
}

void GradientAccumulator::Begin() {
  torch::NoGradGuard no_grad;
  // A worker whose part is frozen has none, and an empty list is an error.
  if (!parameters_.empty()) {
    for (auto& group : gradients_) torch::_foreach_zero_(group);
  }
  finished_ = false;
  Select(0);
}

void GradientAccumulator::Select(uint32_t microbatch) {
  const auto& group = gradients_[microbatch % gradients_.size()];
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = group[i];
}

void GradientAccumulator::Finish() {
  if (finished_) return;
  finished_ = true;
  torch::NoGradGuard no_grad;
  for (size_t distance = 1; distance < gradients_.size(); distance *= 2) {
    for (size_t g = 0; g + distance < gradients_.size(); g += 2 * distance) {
      for (size_t i = 0; i < parameters_.size(); ++i) gradients_[g][i].add_(gradients_[g + distance][i]);
    }
  }
  Select(0);
}

namespace {

// Of a gradient on the host. Eight running sums, so that the order of addition is fixed and the loop still vectorises.
double SumOfSquares(const torch::Tensor& gradient) {
  const torch::Tensor flat = gradient.contiguous();
  const float* values = flat.const_data_ptr<float>();
  const int64_t n = flat.numel();
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int64_t lane = 0; lane < 8; ++lane) {
      const double value = values[i + lane];
      sums[lane] += value * value;
    }
  }
  double total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  for (; i < n; ++i) total += static_cast<double>(values[i]) * values[i];
  return total;
}

}  // namespace

void AddGradientNorms(const ParameterStore& store, const std::vector<UpdateRule>& rules, worker::v1::StepReport& report) {
  TORCH_CHECK(rules.size() == store.specs().size(), "one rule a tensor: ", rules.size(), " rules for ", store.specs().size());
  const bool embedding_is_a_copy = store.tied_head().defined() && !store.range().has_embedding;
  const std::string embedding = store.decoder_prefix() + "embed_tokens.weight";
  // Gradients on a device (or of another type) are reduced where they are, in double precision, and fetched all at once.
  std::vector<torch::Tensor> norms_elsewhere;
  std::vector<worker::v1::ParameterNorm*> waiting;
  for (size_t i = 0; i < rules.size(); ++i) {
    const TensorSpec& spec = store.specs()[i];
    if (rules[i].frozen || (embedding_is_a_copy && spec.name == embedding)) continue;
    worker::v1::ParameterNorm* norm = report.add_norms();
    norm->set_name(spec.name);
    const torch::Tensor gradient = store.PublishedGradient(spec.name);
    if (gradient.is_cpu() && gradient.scalar_type() == torch::kFloat) {
      norm->set_squared_norm(SumOfSquares(gradient));
    } else {
      norms_elsewhere.push_back(torch::linalg_vector_norm(gradient, 2, std::nullopt, false, torch::kDouble));
      waiting.push_back(norm);
    }
  }
  if (waiting.empty()) return;
  const torch::Tensor norms = torch::stack(norms_elsewhere).cpu();
  for (size_t i = 0; i < waiting.size(); ++i) {
    const double norm = norms.const_data_ptr<double>()[i];
    waiting[i]->set_squared_norm(norm * norm);
  }
}

}  // namespace moonpipe
