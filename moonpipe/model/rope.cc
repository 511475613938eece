#include "moonpipe/model/rope.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "moonpipe/model/activations.h"
#include "moonpipe/model/row_kernels.h"
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

Tensor RotateOnHost(const Tensor& x, const Tensor& cos_T1d, const Tensor& sin_T1d, int64_t heads, int64_t first_column, float sin_sign) {
  const Tensor x_TNd = x.contiguous();
  Tensor y_TNd = torch::empty_like(x_TNd);
  const int64_t all_heads = x_TNd.size(1), width = x_TNd.size(2), turned = width - first_column;
  const float *const in = x_TNd.const_data_ptr<float>(), *const cos = cos_T1d.const_data_ptr<float>(), *const sin = sin_T1d.const_data_ptr<float>();
  float* const out = y_TNd.data_ptr<float>();
  at::parallel_for(0, x_TNd.size(0), 32, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = in + row * all_heads * width;
      float* to = out + row * all_heads * width;
      for (int64_t head = 0; head < heads; ++head, from += width, to += width) {
        std::copy(from, from + first_column, to);
        rows::RotatePairs(from + first_column, cos + row * turned, sin + row * turned, turned, sin_sign, to + first_column);
      }
      std::copy(from, from + (all_heads - heads) * width, to);
    }
  });
  return y_TNd;
}

Tensor RotateSome(const Tensor& x_TNd, const Tensor& cos_T1d, const Tensor& sin_T1d, int64_t heads, int64_t first_column, bool back) {
  if (IsPlain(x_TNd)) return RotateOnHost(x_TNd, cos_T1d, sin_T1d, heads, first_column, back ? -1.0f : 1.0f);
  Tensor y_TNd = x_TNd.clone();
  const Tensor part = y_TNd.narrow(1, 0, heads).narrow(2, first_column, x_TNd.size(2) - first_column);
  part.copy_(RotateRows(part, cos_T1d, back ? sin_T1d.neg() : sin_T1d));
  return y_TNd;
}

// The gradient of a rotation is the rotation back.
class RotateFunction : public torch::autograd::Function<RotateFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x_TNd, const Tensor& cos_T1d, const Tensor& sin_T1d, int64_t heads,
                        int64_t first_column) {
    context->save_for_backward({cos_T1d, sin_T1d});
    context->saved_data["heads"] = heads;
    context->saved_data["first_column"] = first_column;
    return RotateSome(x_TNd, cos_T1d, sin_T1d, heads, first_column, false);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor dx_TNd = RotateSome(gradients[0], saved[0], saved[1], context->saved_data["heads"].toInt(),
                                     context->saved_data["first_column"].toInt(), true);
    return {dx_TNd, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

double YarnMagnitude(double factor, double mscale) { return factor > 1 ? 0.1 * mscale * std::log(factor) + 1 : 1; }

}  // namespace

RotaryTable MakeRotaryTable(const Tensor& angles_Tp) {
  const Tensor sin_Tp = angles_Tp.sin();
  return {angles_Tp.cos().repeat_interleave(2, 1).unsqueeze(1), torch::stack({sin_Tp.neg(), sin_Tp}, -1).flatten(1).unsqueeze(1)};
}

Tensor RotatePart(const Tensor& x_TNd, const RotaryTable& table, int64_t heads, int64_t first_column) {
  TORCH_CHECK(table.cos_T1d.size(0) == x_TNd.size(0) && table.cos_T1d.size(2) == x_TNd.size(2) - first_column && heads <= x_TNd.size(1),
              "a rotary table of ", table.cos_T1d.sizes(), " for the columns from ", first_column, " of ", x_TNd.sizes());
  return RotateFunction::apply(x_TNd, table.cos_T1d, table.sin_T1d, heads, first_column);
}

Tensor Rotate(const Tensor& x_TNd, const RotaryTable& table) { return RotatePart(x_TNd, table, x_TNd.size(1), 0); }

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
