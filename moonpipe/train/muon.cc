#include "moonpipe/train/muon.h"

#include <algorithm>
#include <cmath>

namespace moonpipe {
namespace {

using torch::Tensor;

constexpr int kIterations = 5;
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
constexpr double kLeastNorm = 1e-7;
constexpr double kAdamWSize = 0.2;

}  // namespace

Tensor Orthogonalize(const Tensor& matrix_RC) {
  // The products are of the smaller side.
  const bool tall = matrix_RC.size(0) > matrix_RC.size(1);
  Tensor x = tall ? matrix_RC.t().contiguous() : matrix_RC.contiguous();
  x = x / x.norm().clamp_min(kLeastNorm);
  for (int i = 0; i < kIterations; ++i) {
    const Tensor a = at::mm(x, x.t());
    const Tensor polynomial = at::addmm(a, a, a, kB, kC);
    x = at::addmm(x, polynomial, x, kA, 1);
  }
  return tall ? x.t() : x;
}

void TakeMuonStep(const MuonStep& step, const std::vector<MatrixPart>& parts, Tensor value, const Tensor& gradient, Tensor momentum) {
  momentum.lerp_(gradient, 1 - step.momentum);
  const Tensor update = gradient.lerp(momentum, step.momentum);
  if (step.learning_rate == 0) return;  // not even the sign of a zero moves
  value.mul_(1 - step.learning_rate * step.weight_decay);
  const int64_t columns = value.size(1);
  for (const MatrixPart& part : parts) {
    const auto view = [&](const Tensor& whole) { return whole.unflatten(0, {part.blocks, -1}).narrow(1, part.first, part.rows); };
    const int64_t rows = part.blocks * part.rows;
    const Tensor orthogonal = Orthogonalize(view(update).reshape({rows, columns}));
    const double size = kAdamWSize * std::sqrt(static_cast<double>(std::max(rows, columns)));
    view(value).add_(orthogonal.view_as(view(value)), -step.learning_rate * size);
  }
}

}  // namespace moonpipe
