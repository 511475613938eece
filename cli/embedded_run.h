// One run on an embedded cluster, from the first process to the last.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "moonpipe/cluster/v1/cluster_service.pb.h"
#include "moonpipe/cluster/v1/training_run.pb.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"

namespace moonpipe {

struct EmbeddedRun {
  std::string runs_folder;
  std::string id;
  cluster::v1::TrainingRunSpec spec;
  bool evaluate_only = false;
  bool json = false;
  bool quiet = false;  // prints nothing of its own, neither steps nor the plan, and its errors do not say how to go on
  std::function<void(const cluster::v1::StepEvent&)> on_step;  // on a thread of its own, which ends before RunEmbedded does
};

// Starts a cluster, runs to the end and returns the run's last state. Ctrl-C stops the run after the step in progress. The error is
// what a person should read.
absl::StatusOr<cluster::v1::TrainingRun> RunEmbedded(const EmbeddedRun& run);

}  // namespace moonpipe
