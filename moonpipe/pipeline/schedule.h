// A schedule is data: the actions of every worker in order, made by pure functions, printable, checkable, priceable.
// The executor only walks the list. No LibTorch, no clock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moonpipe {

// Codes as printed: `2F0` is chunk 2, forward, microbatch 0. The vision tower is chunk `V`. Actions without a
// microbatch (reduce, report) end in nothing: `0RT`.
enum class ActionType {
  kForward,                 // F   0F3, VF3: the tower encodes the pictures of microbatch 3
  kBackward,                // B   input and weight gradients
  kSendActivation,          // SA  to the next chunk
  kReceiveActivation,       // RA  from the previous chunk
  kSendGradient,            // SG  of the input, to the previous chunk
  kReceiveGradient,         // RG  of the output, from the next chunk
  kSendFeatures,            // SF  tower to chunk 0
  kReceiveFeatures,         // RF
  kSendFeatureGradient,     // SH  chunk 0 to the tower
  kReceiveFeatureGradient,  // RH
  kReduceTied,              // RT  embedding and head exchange their gradients of a tied weight (last and first stage)
  kReport,                  // RP  gradients are complete
};

inline constexpr int32_t kVisionChunk = -1;

struct Action {
  int32_t chunk = 0;  // decoder chunk (stage), or kVisionChunk
  ActionType type = ActionType::kForward;
  int32_t microbatch = -1;  // -1 for actions without one

  bool operator==(const Action&) const = default;
  std::string ToString() const;
};
// INVALID_ARGUMENT with the text that is no action.
absl::StatusOr<Action> ParseAction(absl::string_view text);

// One worker's list.
struct WorkerActions {
  std::vector<int32_t> chunks;  // the chunks this worker owns, kVisionChunk first
  std::vector<Action> actions;
};

struct ScheduleOptions {
  std::string name = "1f1b";  // 1f1b or gpipe
  int32_t stages = 1;         // decoder chunks, one a worker
  int32_t microbatches = 1;
  bool has_vision = true;  // the model has a tower
  // The tower's chunk lies on the worker of stage 0; says nothing without a tower.
  bool vision_in_first_stage = false;
  bool tied_embeddings = false;  // adds RT where first and last stage differ
  bool forward_only = false;     // decoding: no backward, no report of gradients
};

struct Schedule {
  ScheduleOptions options;
  // The encoder's worker first (if it is one of its own), then stage 0 to the last.
  std::vector<WorkerActions> workers;
  // One line a worker, actions separated by blanks.
  std::string ToString() const;
};

// INVALID_ARGUMENT for an unknown name (with the known ones) or numbers the schedule is not defined for.
// In 1F1B the tower counts as a stage ahead of stage 0: with p pipeline positions in all, position r runs p-1-r
// forwards ahead before it alternates one forward, one backward. Sends and receives are their own actions. A tower on
// the worker of stage 0 hands its features over in memory: no SF, RF, SH, RH there, VF(m) stands right before 0F(m) and
// VB(m) right after 0B(m). Backwards of a chunk always stand in the order of their microbatches: it is the order in
// which gradients are added.
absl::StatusOr<Schedule> MakeSchedule(const ScheduleOptions& options);

// Proves that the schedule is complete (every microbatch passes every chunk once forward and once backward, backwards
// in the order of their microbatches, sends and receives pair up in the same order on both ends of every edge, the
// report is last) and free of deadlock when every send waits for its receive: rendezvous with no buffer at all, nothing
// posted ahead. The executor's edges read ahead and send behind, so what runs without buffers runs with them.
// INVALID_ARGUMENT names the worker and the action.
absl::Status ValidateSchedule(const Schedule& schedule);

}  // namespace moonpipe
