// The decision at the end of a step: commit with a clip factor, or skip. Pure: from the reports of all workers to
// numbers and a reason.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "moonpipe/data/v1/manifest.pb.h"
#include "moonpipe/worker/v1/worker_service.pb.h"

namespace moonpipe {

struct StepInputs {
  uint64_t generation = 0;
  uint64_t step = 0;
  const data::v1::StepManifest* manifest = nullptr;  // not null
  std::vector<uint32_t> workers;                     // who must report
  // Every entry of the gradient norm in canonical order: the trained tensors of the model under their published names.
  // A tied weight is one entry; frozen tensors have none; a part that had no work reports zeros.
  std::vector<std::string> parameter_names;
  double max_grad_norm = 1;  // 0 does not clip
};

struct StepDecision {
  bool commit = false;
  std::string skip_reason;  // empty, not_finite; nothing for a commit
  double clip_factor = 1;   // min(1, max_grad_norm / (grad_norm + 1e-6))
  double grad_norm = 0;     // before clipping
  double loss = 0;          // mean over the trained labels of the step; 0 where there is none
  uint64_t trained_labels = 0;
  std::vector<worker::v1::ExpertCounts> expert_counts;  // summed over the workers, layers ascending
  std::vector<worker::v1::LargestLogits> largest_logits;  // the maximum over the workers, layers ascending; for QK-clip
  double balance_loss = 0;                                // summed over the workers
  // Part of the decoder stages' time between the first begin and the last end of any action in which they computed
  // neither forward nor backward, 0 to 1; 0 where nothing was timed.
  double bubble_ratio = 0;
  uint64_t peak_memory_bytes = 0;  // of the largest worker
};

// Adds in fixed orders, all in double precision: norms by `parameter_names`, losses by microbatch. So the numbers
// depend on neither the number of stages nor the order in which reports came in. ABORTED for a report of another
// generation or step; FAILED_PRECONDITION for a missing worker or one that nobody expects; INVALID_ARGUMENT, naming it,
// for a parameter norm that is missing, double, unknown or negative, for a microbatch loss that is missing, double or
// counts other labels than the manifest, and for expert counts or largest logits of unequal length.
absl::StatusOr<StepDecision> DecideStep(const StepInputs& inputs,
                                        const std::map<uint32_t, worker::v1::StepReport>& reports);

}  // namespace moonpipe
