// Who does what: from the spec, the model and the workers that are there to one Plan a worker. Pure: equal inputs give
// equal plans.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/data/v1/manifest.pb.h"
#include "moonpipe/pipeline/schedule.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/tensor_list.h"
#include "moonpipe/worker/v1/plan.pb.h"
#include "moonpipe/worker/v1/worker_service.pb.h"

namespace moonpipe {

struct RegisteredWorker {
  uint32_t worker = 0;  // its number, as in Welcome
  worker::v1::Register registration;
};

struct PlanInputs {
  uint64_t generation = 0;
  std::string run;
  cluster::v1::TrainingRunSpec spec;  // defaults filled in
  ModelConfig model;
  std::vector<RegisteredWorker> workers;  // those whose streams stand, in any order
  worker::v1::InitialState initial_state;
  data::v1::DataCursor cursor;
  // Random bytes that nobody else knows; every token of the plan is a hash over them, the generation and the token's
  // use.
  std::string secret;
};

struct ClusterPlan {
  uint64_t generation = 0;
  // One a planned worker, by its number. Workers that are there but not needed have none.
  std::map<uint32_t, worker::v1::Plan> plans;
  uint32_t dataloader = 0;
  std::optional<uint32_t> encoder;   // absent without a tower, or where the first stage owns it
  std::vector<uint32_t> stages;      // worker of each stage
  std::vector<PartRange> parts;      // part of each stage
  ScheduleOptions schedule_options;  // of a training step

  // The worker of each list of a schedule: the encoder (if there is one), then the stages.
  std::vector<uint32_t> ScheduleWorkers() const;
};

// Workers take the places of their role in the order of their wished numbers, ties by worker number; spare ones stay
// idle. Edges, in the order in which everybody builds them (one global order, so that no two workers wait for each
// other crosswise):
//   features, feature-gradient        encoder to stage 0 and back
//   activation.N, gradient.N          stage N to N + 1 and back, N ascending
//   tied-gradient.forward, .back      stage 0 to the last stage and back, with tied embeddings
// The owner of the tower may fetch PIXELS, stage 0 TOKENS, the last stage LABELS, and nobody anything else; a worker
// that fetches nothing holds no token. UNAVAILABLE lists every worker that is missing (more may come: ask again);
// INVALID_ARGUMENT for a spec that this model cannot follow.
absl::StatusOr<ClusterPlan> BuildPlan(const PlanInputs& inputs);

}  // namespace moonpipe
