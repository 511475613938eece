#include "moonpipe/train/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/strings/str_cat.h"

namespace moonpipe {
namespace {

using Schedule = cluster::v1::LearningRateSchedule;

Schedule::Kind KindOf(const Schedule& schedule) {
  return schedule.kind() == Schedule::KIND_UNSPECIFIED ? Schedule::KIND_COSINE : schedule.kind();
}
double FloorOf(const Schedule& schedule) { return schedule.has_min_ratio() ? schedule.min_ratio() : 0.1; }
uint64_t DecayOf(const Schedule& schedule, uint64_t total_steps) {
  return schedule.has_decay_steps() ? schedule.decay_steps() : total_steps / 5;
}

}  // namespace

double LearningRateFactor(const Schedule& schedule, uint64_t total_steps, uint64_t step) {
  const uint64_t warmup = schedule.warmup_steps();
  if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
  const Schedule::Kind kind = KindOf(schedule);
  if (kind == Schedule::KIND_CONSTANT) return 1;

  // Both shapes are a fall over the steps [begin, total_steps).
  uint64_t begin = std::min(warmup, total_steps);
  if (kind == Schedule::KIND_WSD)
    begin = std::max(begin, total_steps - std::min(total_steps, DecayOf(schedule, total_steps)));
  if (step < begin) return 1;
  const double floor = FloorOf(schedule);
  if (step >= total_steps) return begin == total_steps && kind == Schedule::KIND_WSD ? 1 : floor;
  const double progress = static_cast<double>(step + 1 - begin) / static_cast<double>(total_steps - begin);
  if (kind == Schedule::KIND_WSD) return 1 - (1 - floor) * progress;
  return floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

absl::Status CheckLearningRateSchedule(const Schedule& schedule, uint64_t total_steps) {
  const double floor = FloorOf(schedule);
  if (!(floor >= 0 && floor <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer.schedule.min_ratio is ", floor, ", it must lie between 0 and 1"));
  }
  if (schedule.warmup_steps() > total_steps) {
    return absl::InvalidArgumentError(absl::StrCat("optimizer.schedule.warmup_steps is ", schedule.warmup_steps(),
                                                   ", train.steps is ", total_steps,
                                                   "; the peak would never be reached"));
  }
  if (KindOf(schedule) == Schedule::KIND_WSD &&
      DecayOf(schedule, total_steps) > total_steps - schedule.warmup_steps()) {
    return absl::InvalidArgumentError(absl::StrCat("optimizer.schedule: warmup_steps ", schedule.warmup_steps(),
                                                   " and decay_steps ", DecayOf(schedule, total_steps),
                                                   " together exceed train.steps ", total_steps));
  }
  return absl::OkStatus();
}

}  // namespace moonpipe
