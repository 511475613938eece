#include "moonpipe/model/fresh_weights.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <numbers>

namespace moonpipe {
namespace {

// SplitMix64's finaliser: every bit of the input reaches every bit of the output.
uint64_t Mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

uint64_t HashName(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3ULL;
  return hash;
}

// In (0, 1): never 0, whose logarithm is needed.
double Uniform(uint64_t key, uint64_t counter) {
  return (static_cast<double>(Mix(key + counter * 0x9e3779b97f4a7c15ULL) >> 11) + 0.5) * 0x1p-53;
}

// Box and Muller's cosine branch. A value beyond the cut is drawn anew from the element's own next counters.
double Normal(uint64_t key, uint64_t index, double deviation, double cut) {
  for (uint64_t attempt = 0;; ++attempt) {
    const uint64_t element_key = Mix(key ^ Mix(index + 1)) + attempt;
    const double radius = std::sqrt(-2.0 * std::log(Uniform(element_key, 1)));
    const double value = deviation * radius * std::cos(2.0 * std::numbers::pi * Uniform(element_key, 2));
    if (cut <= 0 || std::abs(value) <= cut) return value;
  }
}

}  // namespace

void DrawFreshTensor(uint64_t seed, const TensorSpec& spec, torch::Tensor out) {
  TORCH_CHECK(out.sizes() == torch::IntArrayRef(spec.shape), spec.name, " is ", out.sizes(), " here but ", torch::IntArrayRef(spec.shape),
              " in the model");
  const torch::NoGradGuard no_grad;
  switch (spec.initializer) {
    case Initializer::kZeros:
      out.zero_();
      return;
    case Initializer::kOnes:
      out.fill_(1);
      return;
    case Initializer::kNormal:
    case Initializer::kTruncatedNormal:
      break;
  }
  const uint64_t key = Mix(seed ^ Mix(HashName(spec.name)));
  const double cut = spec.initializer == Initializer::kTruncatedNormal ? spec.cut : 0;
  const bool in_place = out.is_cpu() && out.scalar_type() == torch::kFloat && out.is_contiguous();
  torch::Tensor drawn = in_place ? out : torch::empty(spec.shape, torch::kFloat);
  float* values = drawn.data_ptr<float>();
  at::parallel_for(0, drawn.numel(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] = static_cast<float>(Normal(key, static_cast<uint64_t>(i), spec.std, cut));
  });
  if (!in_place) out.copy_(drawn);
}

void DrawFreshWeights(uint64_t seed, ParameterStore& store) {
  for (const Parameter& parameter : store.parameters()) {
    for (size_t i = 0; i < parameter.published.size(); ++i) DrawFreshTensor(seed, parameter.published[i], parameter.PublishedValue(i));
  }
}

}  // namespace moonpipe
