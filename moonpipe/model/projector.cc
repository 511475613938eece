#include "moonpipe/model/projector.h"

#include "moonpipe/model/linear.h"
#include "moonpipe/model/norms.h"

namespace moonpipe {

Projector::Projector(const ParameterStore& store) : eps_(store.config().projector_ln_eps) {
  const bool patch_merger = store.config().architecture == Architecture::kKimiK25;
  const std::string prefix = patch_merger ? "mm_projector." : "multi_modal_projector.";
  const std::string first = prefix + (patch_merger ? "proj.0" : "linear_1");
  const std::string second = prefix + (patch_merger ? "proj.2" : "linear_2");
  norm_weight_ = store.Get(prefix + "pre_norm.weight");
  norm_bias_ = store.Get(prefix + "pre_norm.bias");
  first_weight_ = store.Get(first + ".weight");
  first_bias_ = store.Get(first + ".bias");
  second_weight_ = store.Get(second + ".weight");
  second_bias_ = store.Get(second + ".bias");
}

torch::Tensor Projector::Forward(const torch::Tensor& merged_MmD) const {
  const torch::Tensor flat = LayerNorm(merged_MmD, norm_weight_, norm_bias_, eps_).flatten(1);
  return Linear(at::gelu(Linear(flat, first_weight_, first_bias_), "none"), second_weight_, second_bias_);
}

}  // namespace moonpipe
