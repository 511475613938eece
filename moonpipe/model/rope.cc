#include "moonpipe/model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "moonpipe/model/test_faults.h"

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kPatchTheta = 10000.0;

// y = cos * x + sin * swapped(x), where swapping exchanges the two entries of each pair.
Tensor RotateRows(const Tensor& x_TNd, const Tensor& cos_T1d, const Tensor& sin_T1d) {
  const Tensor x32 = x_TNd.to(torch::kFloat);
  const Tensor swapped = x32.unflatten(-1, {-1, 2}).flip(-1).flatten(-2);
  return (x32 * cos_T1d).add_(swapped * sin_T1d).to(x_TNd.scalar_type());
}

// The gradient of a rotation is the rotation back.
class RotateFunction : public torch::autograd::Function<RotateFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x_TNd, const Tensor& cos_T1d, const Tensor& sin_T1d) {
    context->save_for_backward({cos_T1d, sin_T1d});
    return RotateRows(x_TNd, cos_T1d, sin_T1d);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    return {RotateRows(gradients[0], saved[0], saved[1].neg()), Tensor(), Tensor()};
  }
};

double YarnMagnitude(double factor, double mscale) { return factor > 1 ? 0.1 * mscale * std::log(factor) + 1 : 1; }

}  // namespace

RotaryTable MakeRotaryTable(const Tensor& angles_Tp) {
  const Tensor sin_Tp = angles_Tp.sin();
  return {angles_Tp.cos().repeat_interleave(2, 1).unsqueeze(1), torch::stack({sin_Tp.neg(), sin_Tp}, -1).flatten(1).unsqueeze(1)};
}

Tensor Rotate(const Tensor& x_TNd, const RotaryTable& table) { return RotateFunction::apply(x_TNd, table.cos_T1d, table.sin_T1d); }

std::vector<float> TextFrequencies(const TextConfig& config) {
  const int64_t width = config.qk_rope_head_dim;
  const auto pairs = static_cast<double>(width / 2);
  std::vector<float> frequencies;
  double low = 0;
  double high = 0;
  if (config.rope_scaling.has_value()) {
    const RopeScaling& yarn = *config.rope_scaling;
    const auto d = static_cast<double>(width);
    // The pair that turns `turns` times over the original context.
    const auto correction = [&](double turns) {
      return d * std::log(static_cast<double>(yarn.original_max_position_embeddings) / (2 * std::numbers::pi * turns)) /
             (2 * std::log(config.rope_theta));
    };
    low = std::max(std::floor(correction(yarn.beta_fast)), 0.0);
    high = std::min(std::ceil(correction(yarn.beta_slow)), d - 1);
    if (low == high) high += 0.001;
  }
  for (int64_t pair = 0; pair < width / 2; ++pair) {
    const auto index = static_cast<double>(pair);
    double frequency = std::pow(config.rope_theta, -index / pairs);
    if (config.rope_scaling.has_value()) {
      const double ramp = std::clamp((index - low) / (high - low), 0.0, 1.0);
      frequency = frequency / config.rope_scaling->factor * ramp + frequency * (1 - ramp);
    }
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

double AttentionScale(const TextConfig& config) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(config.qk_head_dim()));
  if (!config.rope_scaling.has_value() || HasTestFault(TestFault::kNoMscale)) return scale;
  const double magnitude = YarnMagnitude(config.rope_scaling->factor, config.rope_scaling->mscale_all_dim);
  return scale * magnitude * magnitude;
}

Tensor TextAngles(const TextConfig& config, int64_t count) {
  const std::vector<float> frequencies = TextFrequencies(config);
  const Tensor positions = torch::arange(count, torch::kFloat).unsqueeze(1);
  return positions * torch::tensor(frequencies).unsqueeze(0);
}

Tensor PatchAngles(int64_t rows, int64_t cols, int64_t head_dim) {
  const int64_t frequencies = head_dim / 4;
  Tensor angles = torch::empty({rows, cols, frequencies, 2});
  auto access = angles.accessor<float, 4>();
  const int64_t by_column = HasTestFault(TestFault::kPatchPairOrder) ? 1 : 0;
  for (int64_t k = 0; k < frequencies; ++k) {
    const auto frequency = static_cast<float>(std::pow(kPatchTheta, -4.0 * static_cast<double>(k) / static_cast<double>(head_dim)));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        access[row][col][k][by_column] = static_cast<float>(col) * frequency;
        access[row][col][k][1 - by_column] = static_cast<float>(row) * frequency;
      }
    }
  }
  return angles.view({rows * cols, head_dim / 2});
}

}  // namespace moonpipe
