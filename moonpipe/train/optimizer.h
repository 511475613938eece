// The update of one worker's published tensors, each by its rule: AdamW with decoupled decay (I. Loshchilov, F. Hutter, 2019) by LibTorch's
// fused kernel, with the arithmetic of torch.optim.AdamW, or Muon (muon.h). The step count that corrects AdamW's moments counts committed
// steps only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/model/parameter_store.h"
#include "moonpipe/spec/safetensors.h"
#include "moonpipe/train/muon_parts.h"
#include "moonpipe/train/parameter_groups.h"

namespace moonpipe {

class Optimizer {
 public:
  // `store` must outlive the optimizer. `rules` has one entry a published tensor of the store. Frozen tensors get no state.
  Optimizer(ParameterStore* store, const cluster::v1::OptimizerSpec& spec, std::vector<UpdateRule> rules);

  // Multiplies every gradient by `clip_factor` and takes one step at each tensor's peak rate times `learning_rate_factor`. With
  // `move_vision` and `move_decoder` false a part without work in the step stays as it is; otherwise it is stepped with its (zero)
  // gradients: moments fade and weights decay.
  void Step(double clip_factor, double learning_rate_factor, bool move_vision = true, bool move_decoder = true);

  uint64_t steps() const { return steps_; }
  const std::vector<UpdateRule>& rules() const { return rules_; }

  // Moments as `exp_avg.NAME` and `exp_avg_sq.NAME`, Muon's as `momentum.NAME`. The bytes are in host memory, belong to the
  // optimizer and are good until the next call of Step or State: moments that live on a device are copied.
  std::vector<StoredTensor> State() const;
  // Reads the moments of this worker's tensors out of optimizer files, whatever worker wrote them. NOT_FOUND names the tensor that
  // none of them has; FAILED_PRECONDITION where they hold the state of the other kind of update; INVALID_ARGUMENT for another shape, with
  // both.
  absl::Status LoadState(const std::vector<SafetensorsFile>& files, uint64_t steps);

  // Bytes of the moments.
  uint64_t state_bytes() const;

 private:
  struct Entry {
    std::string name;
    ModelPartKind part;
    torch::Tensor value;  // views of published tensors
    torch::Tensor exp_avg;     // AdamW's, or Muon's momentum
    torch::Tensor exp_avg_sq;  // AdamW's
    UpdateRule rule;
    std::vector<MatrixPart> parts;  // Muon's
  };

  // The moments of an entry under the names of their kind.
  static std::vector<std::pair<std::string, torch::Tensor>> MomentsOf(const Entry& entry);

  ParameterStore* const store_;
  const double beta1_, beta2_, epsilon_, momentum_;
  std::vector<UpdateRule> rules_;
  std::vector<Entry> entries_;
  mutable std::vector<torch::Tensor> host_copies_;  // what State gave out
  uint64_t steps_ = 0;
};

}  // namespace moonpipe
