// The gradients of one worker during a step: fixed groups of microbatches, summed over a fixed tree, and their norms.
//
// Microbatch i belongs to group i mod G. A group sums in the order of its microbatches; the groups are summed pairwise, neighbours
// first. So the bits depend on G alone and not on how many replicas share the groups.
#pragma once

#include <cstdint>
#include <vector>

#include "moonpipe/model/parameter_store.h"
#include "moonpipe/train/parameter_groups.h"
#include "moonpipe/worker/v1/worker_service.pb.h"

namespace moonpipe {

class GradientAccumulator {
 public:
  // `store` must outlive the accumulator. Allocates `groups` gradients for each parameter that requires one now: freeze before.
  GradientAccumulator(ParameterStore* store, uint32_t groups);

  // Sets all to zero: the begin of a step.
  void Begin();
  // The next backward adds to this microbatch's group.
  void Select(uint32_t microbatch);
  // Sums the groups into the parameters' gradients. Once a step; further calls do nothing.
  void Finish();

 private:
  ParameterStore* const store_;
  std::vector<torch::Tensor> parameters_;                // leaves that require a gradient, the tied head last
  std::vector<std::vector<torch::Tensor>> gradients_;    // [group][parameter]
  bool finished_ = true;
};

// Adds the squared norm of every published gradient that `rules` (one a published tensor) does not freeze, in double precision and
// in one fixed order of addition. A tied embedding is reported by the part that owns the embedding alone.
void AddGradientNorms(const ParameterStore& store, const std::vector<UpdateRule>& rules, worker::v1::StepReport& report);

}  // namespace moonpipe
