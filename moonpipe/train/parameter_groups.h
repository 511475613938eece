// Which update rule each parameter follows. Torch-free, so that the coordinator refuses a bad group before any worker starts.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

enum class UpdateKind { kAdamW, kMuon };
// "adamw" or "muon", as in a run file.
const char* UpdateKindName(UpdateKind kind);

// The rule of one parameter, groups applied.
struct UpdateRule {
  double learning_rate = 0;  // at the peak; a step multiplies it by the schedule's factor
  double weight_decay = 0;
  bool frozen = false;
  UpdateKind kind = UpdateKind::kAdamW;  // Muon only for tensors of TakesMuon
  bool operator==(const UpdateRule&) const = default;
};

// One rule a tensor, in the order of `tensors`; buffers are frozen. The first group that matches a tensor wins; a group matches by
// part (vision, projector, decoder) or by a pattern of `*` and `?` over the whole name. `all_tensors` is the whole model's list: a
// group that matches nothing in it is INVALID_ARGUMENT with the nearest names, even where `tensors` is only one worker's part. Where a
// kind is muon, tensors that Muon does not take keep AdamW.
absl::StatusOr<std::vector<UpdateRule>> AssignUpdateRules(const cluster::v1::OptimizerSpec& optimizer,
                                                          const std::vector<TensorSpec>& tensors,
                                                          const std::vector<TensorSpec>& all_tensors);

// True if `pattern` (`*` any run, `?` any one character) matches all of `text`.
bool MatchesPattern(absl::string_view pattern, absl::string_view text);

}  // namespace moonpipe
