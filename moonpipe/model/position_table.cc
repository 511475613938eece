#include "moonpipe/model/position_table.h"

#include <algorithm>
#include <cmath>

#include "moonpipe/model/test_faults.h"

namespace moonpipe {
namespace {

using torch::Tensor;

double CubicKernel(double distance) {
  const double a = HasTestFault(TestFault::kCubicConstant) ? -0.5 : -0.75;
  const double t = std::abs(distance);
  if (t <= 1) return ((a + 2) * t - (a + 3)) * t * t + 1;
  if (t < 2) return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a;
  return 0;
}

}  // namespace

Tensor CubicWeights(int64_t to, int64_t from) {
  Tensor weights = torch::zeros({to, from}, torch::kDouble);
  auto access = weights.accessor<double, 2>();
  for (int64_t i = 0; i < to; ++i) {
    const double source = (static_cast<double>(i) + 0.5) * static_cast<double>(from) / static_cast<double>(to) - 0.5;
    const double floor = std::floor(source);
    for (int64_t tap = -1; tap <= 2; ++tap) {
      // Several taps fall on the same entry at the edges.
      const int64_t entry = std::clamp(static_cast<int64_t>(floor) + tap, int64_t{0}, from - 1);
      access[i][entry] += CubicKernel(source - floor - static_cast<double>(tap));
    }
  }
  return weights.to(torch::kFloat);
}

// Two small matrix products, so the gradient is two as well, and neither depends on the library's resize kernels.
Tensor InterpolatePositions(const Tensor& table_RCD, const Tensor& rows_hR, const Tensor& cols_wC) {
  const int64_t width = table_RCD.size(2);
  if (rows_hR.size(0) == table_RCD.size(0) && cols_wC.size(0) == table_RCD.size(1)) return table_RCD.view({-1, width});
  const Tensor table32 = table_RCD.to(torch::kFloat);
  const Tensor by_row_hCD = at::mm(rows_hR, table32.view({table32.size(0), -1})).view({rows_hR.size(0), -1, width});
  return at::matmul(cols_wC, by_row_hCD).view({-1, width}).to(table_RCD.scalar_type());
}

Tensor FramePositions(int64_t frames, int64_t width) {
  const Tensor exponents = torch::arange(width / 2, torch::kDouble) / static_cast<double>(width / 2);
  const Tensor frequencies = torch::pow(10000.0, exponents.neg());
  const Tensor angles = torch::arange(frames, torch::kDouble).unsqueeze(1) * frequencies;
  return torch::cat({angles.sin(), angles.cos()}, 1).to(torch::kFloat);
}

}  // namespace moonpipe
