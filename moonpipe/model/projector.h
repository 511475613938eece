// From the tower's merged patches to the decoder's hidden size: norm each vector, flatten, linear, GELU (exact), linear.
//
// Shapes: M feature rows, m vectors merged into one (4), D tower width, H decoder hidden.
#pragma once

#include <torch/torch.h>

#include "moonpipe/model/parameter_store.h"

namespace moonpipe {

class Projector {
 public:
  explicit Projector(const ParameterStore& store);
  // merged_MmD [M, m, D] -> [M, H].
  torch::Tensor Forward(const torch::Tensor& merged_MmD) const;

 private:
  double eps_;
  torch::Tensor norm_weight_;
  torch::Tensor norm_bias_;
  torch::Tensor first_weight_;
  torch::Tensor first_bias_;
  torch::Tensor second_weight_;
  torch::Tensor second_bias_;
};

}  // namespace moonpipe
