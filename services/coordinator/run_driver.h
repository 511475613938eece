// Drives one run from its workers' registration to its report: plan, steps, checkpoints, evaluation. One thread, in straight lines;
// every decision is made by a pure function (plan_builder, step_commit, lr_schedule, checkpoint_ledger) and every wait has a deadline.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "moonpipe/metrics/registry.h"
#include "services/coordinator/run_registry.h"
#include "services/coordinator/worker_hub.h"

namespace moonpipe {

struct RunDriverOptions {
  WorkerHub* hub = nullptr;
  RunRegistry* runs = nullptr;
  MetricsRegistry* metrics = nullptr;
  // Grows over the life of the coordinator; the driver counts it up with every plan.
  uint64_t* generation = nullptr;
};

// Blocks until the run has ended and leaves its state and error in the registry. The workers are drained in any case.
void DriveRun(const RunDriverOptions& options, const RunRegistry::Job& job);

}  // namespace moonpipe
