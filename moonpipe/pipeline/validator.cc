// Two proofs: the lists are complete and in order on every worker (a look at each list alone), and no wait is for ever
// (a run of all lists together, where a send and its receive happen at the same moment or not at all).
#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/pipeline/schedule.h"

namespace moonpipe {
namespace {

using Type = ActionType;

// Where an action stands in its worker's list.
using Places = std::map<std::tuple<int32_t, Type, int32_t>, size_t>;

std::string ChunkName(int32_t chunk) { return chunk == kVisionChunk ? "the tower" : absl::StrCat("stage ", chunk); }

struct Shape {
  explicit Shape(const ScheduleOptions& o)
      : options(o),
        own_tower(o.has_vision && !o.vision_in_first_stage),
        inner_tower(o.has_vision && o.vision_in_first_stage) {}

  size_t num_workers() const { return static_cast<size_t>(options.stages) + (own_tower ? 1 : 0); }
  size_t WorkerOf(int32_t chunk) const {
    return chunk == kVisionChunk ? 0 : static_cast<size_t>(chunk) + (own_tower ? 1 : 0);
  }
  std::vector<int32_t> ChunksOf(size_t worker) const {
    const int32_t chunk = static_cast<int32_t>(worker) - (own_tower ? 1 : 0);
    return inner_tower && worker == 0 ? std::vector<int32_t>{kVisionChunk, 0} : std::vector<int32_t>{chunk};
  }
  bool tied() const { return options.tied_embeddings && options.stages > 1 && !options.forward_only; }

  // What a chunk does with one microbatch, in the order that the data dictates.
  std::vector<Type> ForwardTypes(int32_t chunk) const {
    std::vector<Type> types;
    if (chunk == 0 && own_tower) types.push_back(Type::kReceiveFeatures);
    if (chunk > 0) types.push_back(Type::kReceiveActivation);
    types.push_back(Type::kForward);
    if (chunk == kVisionChunk && own_tower) types.push_back(Type::kSendFeatures);
    if (chunk >= 0 && chunk + 1 < options.stages) types.push_back(Type::kSendActivation);
    return types;
  }
  std::vector<Type> BackwardTypes(int32_t chunk) const {
    std::vector<Type> types;
    if (options.forward_only) return types;
    if (chunk == kVisionChunk && own_tower) types.push_back(Type::kReceiveFeatureGradient);
    if (chunk >= 0 && chunk + 1 < options.stages) types.push_back(Type::kReceiveGradient);
    types.push_back(Type::kBackward);
    if (chunk == 0 && own_tower) types.push_back(Type::kSendFeatureGradient);
    if (chunk > 0) types.push_back(Type::kSendGradient);
    return types;
  }

  const ScheduleOptions& options;
  const bool own_tower;
  const bool inner_tower;
};

absl::Status Wrong(size_t worker, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("worker ", worker, ": ", what));
}

absl::StatusOr<Places> FindPlaces(size_t worker, const WorkerActions& list) {
  Places places;
  for (size_t i = 0; i < list.actions.size(); ++i) {
    const Action& action = list.actions[i];
    if (!places.emplace(std::make_tuple(action.chunk, action.type, action.microbatch), i).second) {
      return Wrong(worker, absl::StrCat(action.ToString(), " stands twice"));
    }
  }
  return places;
}

// Takes `expected` out of `left` and gives its place.
absl::StatusOr<size_t> Take(size_t worker, const Action& expected, const Places& places, Places& left) {
  const auto key = std::make_tuple(expected.chunk, expected.type, expected.microbatch);
  const auto found = places.find(key);
  if (found == places.end()) return Wrong(worker, absl::StrCat(expected.ToString(), " is missing"));
  left.erase(key);
  return found->second;
}

absl::Status InOrder(size_t worker, const WorkerActions& list, size_t first, size_t second) {
  if (first < second) return absl::OkStatus();
  return Wrong(worker, absl::StrCat(list.actions[second].ToString(), " stands before ", list.actions[first].ToString(),
                                    ", whose result it needs"));
}

absl::Status CheckWorker(const Shape& shape, size_t worker, const WorkerActions& list) {
  const std::vector<int32_t> chunks = shape.ChunksOf(worker);
  if (list.chunks != chunks) {
    return Wrong(worker, absl::StrCat("owns the chunks ", absl::StrJoin(list.chunks, ", "), ", expected ",
                                      absl::StrJoin(chunks, ", "), " (-1 is the tower)"));
  }
  MOONPIPE_ASSIGN_OR_RETURN(const Places places, FindPlaces(worker, list));
  Places left = places;
  size_t last_work = 0;
  std::map<std::pair<int32_t, int32_t>, std::pair<size_t, size_t>> work;  // chunk, microbatch -> places of F and B
  for (int32_t chunk : chunks) {
    std::optional<size_t> backward_before;
    for (int32_t m = 0; m < shape.options.microbatches; ++m) {
      std::vector<Type> types = shape.ForwardTypes(chunk);
      const std::vector<Type> backward = shape.BackwardTypes(chunk);
      const size_t num_forward = types.size();
      types.insert(types.end(), backward.begin(), backward.end());
      std::optional<size_t> before;
      size_t forward_place = 0;
      size_t backward_place = 0;
      for (size_t i = 0; i < types.size(); ++i) {
        MOONPIPE_ASSIGN_OR_RETURN(const size_t place, Take(worker, {chunk, types[i], m}, places, left));
        // A gradient may come in before the activation has gone out; both only need the forward.
        if (i == num_forward)
          before = types[i] == Type::kBackward ? std::optional<size_t>(forward_place) : std::nullopt;
        if (before.has_value()) MOONPIPE_RETURN_IF_ERROR(InOrder(worker, list, *before, place));
        if (types[i] == Type::kForward) forward_place = place;
        if (types[i] == Type::kBackward) {
          MOONPIPE_RETURN_IF_ERROR(InOrder(worker, list, forward_place, place));
          backward_place = place;
        }
        before = place;
        last_work = std::max(last_work, place);
      }
      work[{chunk, m}] = {forward_place, backward_place};
      if (shape.options.forward_only) continue;
      if (backward_before.has_value() && *backward_before > backward_place) {
        return Wrong(worker, absl::StrCat(list.actions[backward_place].ToString(), " stands before ",
                                          list.actions[*backward_before].ToString(),
                                          "; gradients are added in the order of the microbatches"));
      }
      backward_before = backward_place;
    }
  }
  if (chunks.size() == 2) {
    for (int32_t m = 0; m < shape.options.microbatches; ++m) {
      const auto& tower = work[{kVisionChunk, m}];
      const auto& stage = work[{0, m}];
      MOONPIPE_RETURN_IF_ERROR(InOrder(worker, list, tower.first, stage.first));
      if (!shape.options.forward_only) MOONPIPE_RETURN_IF_ERROR(InOrder(worker, list, stage.second, tower.second));
    }
  }
  const int32_t stage = chunks.back();
  if (shape.tied() && (stage == 0 || stage == shape.options.stages - 1)) {
    MOONPIPE_ASSIGN_OR_RETURN(const size_t place, Take(worker, {stage, Type::kReduceTied, -1}, places, left));
    if (place < last_work) {
      return Wrong(worker, absl::StrCat(list.actions[place].ToString(), " stands before ",
                                        list.actions[last_work].ToString(), "; gradients are complete only behind it"));
    }
  }
  MOONPIPE_ASSIGN_OR_RETURN(const size_t report, Take(worker, {stage, Type::kReport, -1}, places, left));
  if (!left.empty()) {
    size_t place = list.actions.size();
    for (const auto& [key, at] : left) place = std::min(place, at);
    return Wrong(worker, absl::StrCat(list.actions[place].ToString(), " does not belong to ", ChunkName(stage), " of ",
                                      shape.options.stages, " with ", shape.options.microbatches, " microbatches"));
  }
  if (report + 1 != list.actions.size()) {
    return Wrong(worker, absl::StrCat(list.actions[report].ToString(), " stands before ",
                                      list.actions.back().ToString(), "; the report is the last action"));
  }
  return absl::OkStatus();
}

// The action that another worker must be at for this one to happen; nothing for work that a worker does alone.
std::optional<Action> PartnerOf(const Action& action, int32_t stages) {
  const int32_t c = action.chunk;
  switch (action.type) {
    case Type::kSendActivation:
      return Action{c + 1, Type::kReceiveActivation, action.microbatch};
    case Type::kReceiveActivation:
      return Action{c - 1, Type::kSendActivation, action.microbatch};
    case Type::kSendGradient:
      return Action{c - 1, Type::kReceiveGradient, action.microbatch};
    case Type::kReceiveGradient:
      return Action{c + 1, Type::kSendGradient, action.microbatch};
    case Type::kSendFeatures:
      return Action{0, Type::kReceiveFeatures, action.microbatch};
    case Type::kReceiveFeatures:
      return Action{kVisionChunk, Type::kSendFeatures, action.microbatch};
    case Type::kSendFeatureGradient:
      return Action{kVisionChunk, Type::kReceiveFeatureGradient, action.microbatch};
    case Type::kReceiveFeatureGradient:
      return Action{0, Type::kSendFeatureGradient, action.microbatch};
    case Type::kReduceTied:
      return Action{c == 0 ? stages - 1 : 0, Type::kReduceTied, -1};
    case Type::kForward:
    case Type::kBackward:
    case Type::kReport:
      return std::nullopt;
  }
  return std::nullopt;
}

// Both ends of an edge must see its messages in one order.
absl::Status CheckEdgeOrder(const Shape& shape, const Schedule& schedule, size_t worker) {
  std::map<std::pair<int32_t, Type>, std::vector<int32_t>> sent;
  for (const Action& action : schedule.workers[worker].actions)
    sent[{action.chunk, action.type}].push_back(action.microbatch);
  for (const auto& [key, microbatches] : sent) {
    const Action first{key.first, key.second, microbatches[0]};
    const auto partner = PartnerOf(first, shape.options.stages);
    if (!partner.has_value() || first.type == Type::kReduceTied) continue;
    const size_t other = shape.WorkerOf(partner->chunk);
    size_t i = 0;
    for (const Action& action : schedule.workers[other].actions) {
      if (action.chunk != partner->chunk || action.type != partner->type) continue;
      if (action.microbatch != microbatches[i]) {
        const Action here{key.first, key.second, microbatches[i]};
        return Wrong(worker, absl::StrCat(here.ToString(), " meets ", action.ToString(), " of worker ", other,
                                          ": message ", i, " of an edge must be the same on both ends"));
      }
      ++i;
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNoDeadlock(const Shape& shape, const Schedule& schedule) {
  std::vector<size_t> at(schedule.workers.size(), 0);
  const auto current = [&](size_t worker) -> const Action* {
    const auto& actions = schedule.workers[worker].actions;
    return at[worker] < actions.size() ? &actions[at[worker]] : nullptr;
  };
  // Whatever can happen next can only be delayed, never prevented, by doing something else first: any order finds a
  // deadlock.
  bool moved = true;
  while (moved) {
    moved = false;
    for (size_t worker = 0; worker < at.size(); ++worker) {
      while (const Action* action = current(worker)) {
        const auto partner = PartnerOf(*action, shape.options.stages);
        if (partner.has_value()) {
          const size_t other = shape.WorkerOf(partner->chunk);
          const Action* theirs = current(other);
          if (theirs == nullptr || !(*theirs == *partner)) break;
          ++at[other];
        }
        ++at[worker];
        moved = true;
      }
    }
  }
  std::vector<std::string> stuck;
  for (size_t worker = 0; worker < at.size(); ++worker) {
    if (const Action* action = current(worker))
      stuck.push_back(absl::StrCat("worker ", worker, " at ", action->ToString()));
  }
  if (stuck.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("deadlock: ", absl::StrJoin(stuck, ", "), " wait for one another"));
}

}  // namespace

absl::Status ValidateSchedule(const Schedule& schedule) {
  const Shape shape(schedule.options);
  if (schedule.options.stages < 1 || schedule.options.microbatches < 1 ||
      schedule.workers.size() != shape.num_workers()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the schedule has ", schedule.workers.size(), " workers, ", schedule.options.stages, " stages",
                     shape.own_tower ? " and a tower" : "", " need ", shape.num_workers()));
  }
  for (size_t worker = 0; worker < schedule.workers.size(); ++worker) {
    MOONPIPE_RETURN_IF_ERROR(CheckWorker(shape, worker, schedule.workers[worker]));
  }
  for (size_t worker = 0; worker < schedule.workers.size(); ++worker) {
    MOONPIPE_RETURN_IF_ERROR(CheckEdgeOrder(shape, schedule, worker));
  }
  return CheckNoDeadlock(shape, schedule);
}

}  // namespace moonpipe
