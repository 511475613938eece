#include "moonpipe/pipeline/schedule.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/nearest_name.h"

namespace moonpipe {
namespace {

using Type = ActionType;

// Writes one worker's list. A worker is a pipeline position: it takes something in (nothing at the first), computes a
// forward, passes something on (nothing at the last), and the same backward.
class WorkerBuilder {
 public:
  WorkerBuilder(const ScheduleOptions& options, int32_t chunk) : options_(options), chunk_(chunk) {
    tower_inside_ = chunk == 0 && options.has_vision && options.vision_in_first_stage;
    tower_before_ = chunk == 0 && options.has_vision && !options.vision_in_first_stage;
    if (tower_inside_) result_.chunks.push_back(kVisionChunk);
    result_.chunks.push_back(chunk);
  }

  // Takes in and computes the forward of the next microbatch, and passes it on.
  void Forward() {
    TakeIn();
    const int32_t m = next_forward_++;
    if (tower_inside_) Add(kVisionChunk, Type::kForward, m);
    Add(chunk_, Type::kForward, m);
    if (chunk_ == kVisionChunk) {
      Add(chunk_, Type::kSendFeatures, m);
    } else if (!IsLast()) {
      Add(chunk_, Type::kSendActivation, m);
    }
  }

  // Computes the backward of the next microbatch. If a forward follows, its input is taken in before the gradient is
  // passed back: the neighbour ahead sends that activation before it asks for this gradient (its own next backward
  // stands behind that forward), so with rendezvous the other order would hang, and nobody waits longer for this one.
  void Backward(bool forward_follows) {
    const int32_t m = next_backward_++;
    if (chunk_ == kVisionChunk) {
      Add(chunk_, Type::kReceiveFeatureGradient, m);
    } else if (!IsLast()) {
      Add(chunk_, Type::kReceiveGradient, m);
    }
    Add(chunk_, Type::kBackward, m);
    if (tower_inside_) Add(kVisionChunk, Type::kBackward, m);
    if (forward_follows) TakeIn();
    if (tower_before_) {
      Add(chunk_, Type::kSendFeatureGradient, m);
    } else if (chunk_ > 0) {
      Add(chunk_, Type::kSendGradient, m);
    }
  }

  WorkerActions Finish() {
    const bool tied_end = chunk_ == 0 || IsLast();
    if (options_.tied_embeddings && options_.stages > 1 && tied_end && chunk_ != kVisionChunk &&
        !options_.forward_only) {
      Add(chunk_, Type::kReduceTied, -1);
    }
    Add(chunk_, Type::kReport, -1);
    return std::move(result_);
  }

 private:
  bool IsLast() const { return chunk_ == options_.stages - 1; }

  void TakeIn() {
    if (taken_in_ > next_forward_) return;
    if (tower_before_) {
      Add(chunk_, Type::kReceiveFeatures, taken_in_);
    } else if (chunk_ > 0) {
      Add(chunk_, Type::kReceiveActivation, taken_in_);
    }
    ++taken_in_;
  }

  void Add(int32_t chunk, Type type, int32_t microbatch) { result_.actions.push_back({chunk, type, microbatch}); }

  const ScheduleOptions& options_;
  const int32_t chunk_;
  bool tower_inside_ = false;  // the tower's chunk lies on this worker
  bool tower_before_ = false;  // the tower's worker stands ahead of this one
  int32_t taken_in_ = 0;
  int32_t next_forward_ = 0;
  int32_t next_backward_ = 0;
  WorkerActions result_;
};

}  // namespace

absl::StatusOr<Schedule> MakeSchedule(const ScheduleOptions& options) {
  const std::vector<std::string> known = {"1f1b", "gpipe"};
  if (std::find(known.begin(), known.end(), options.name) == known.end()) {
    const std::vector<std::string> nearest = NearestNames(options.name, known);
    return absl::InvalidArgumentError(
        absl::StrCat("there is no schedule \"", options.name, "\"; known are ", absl::StrJoin(known, ", "),
                     nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest[0], "?")));
  }
  if (options.stages < 1 || options.microbatches < 1) {
    return absl::InvalidArgumentError(absl::StrCat("schedule ", options.name,
                                                   " needs at least 1 stage and 1 microbatch, not ", options.stages,
                                                   " and ", options.microbatches));
  }
  const bool own_tower = options.has_vision && !options.vision_in_first_stage;
  const int32_t positions = options.stages + (own_tower ? 1 : 0);
  const int32_t m = options.microbatches;

  Schedule schedule;
  schedule.options = options;
  for (int32_t position = 0; position < positions; ++position) {
    WorkerBuilder worker(options, own_tower ? position - 1 : position);
    // The tower counts as a position of its own: its forwards run ahead like those of any stage, and its features never
    // pile up.
    const int32_t ahead = options.name == "gpipe" || options.forward_only ? m : std::min(m, positions - 1 - position);
    for (int32_t i = 0; i < ahead; ++i) worker.Forward();
    if (!options.forward_only) {
      for (int32_t i = 0; i < m; ++i) {
        if (ahead + i < m) worker.Forward();
        worker.Backward(/*forward_follows=*/ahead + i + 1 < m);
      }
    }
    schedule.workers.push_back(worker.Finish());
  }
  return schedule;
}

}  // namespace moonpipe
