// The learning rate over the steps of a run, as a factor of the peak. Pure; no LibTorch.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"

namespace moonpipe {

// The schedule's value in [0, 1] for the 0-based `step` of a run of `total_steps`; each parameter group's rate is its peak times this.
//
//   warm-up, step < W     (step + 1) / W
//   cosine                min + (1 - min) * (1 + cos(pi * p)) / 2,  p = (step + 1 - W) / (total_steps - W)
//   wsd                   1, then over the last D steps  1 - (1 - min) * p,  p = (step + 1 - (total_steps - D)) / D
//   constant              1
//
// so the peak is reached at the end of the warm-up and the floor min = min_ratio exactly at the last step. D is decay_steps, by default a
// fifth of the steps, and never reaches into the warm-up. Steps past the end stay at the floor. Absent fields take the defaults of
// their comments in training_run_spec.proto.
double LearningRateFactor(const cluster::v1::LearningRateSchedule& schedule, uint64_t total_steps, uint64_t step);

// INVALID_ARGUMENT for a floor outside [0, 1], a warm-up or decay longer than the run, or both together; both numbers are named.
absl::Status CheckLearningRateSchedule(const cluster::v1::LearningRateSchedule& schedule, uint64_t total_steps);

}  // namespace moonpipe
