// The life of a process that computes: vision encoder and decoder stage alike. It carries out the coordinator's commands one after
// another on one thread, which owns the device: plan (weights, edges), steps, commits, saves, drain.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "moonpipe/metrics/registry.h"
#include "moonpipe/runtime/coordinator_client.h"

namespace moonpipe {

struct ComputeWorkerOptions {
  CoordinatorClient* client = nullptr;  // not owned
  MetricsRegistry* metrics = nullptr;   // not owned
  // Where edges listen between hosts, and under which name others reach this one.
  std::string listen_host = "127.0.0.1";
  std::string advertise_host = "127.0.0.1";
  // Folder for Unix sockets.
  std::string socket_folder;
  std::string boot_id;
  double peak_flops_per_second = 0;
};

// Serves until the coordinator drains the worker (OK) or the worker cannot go on (the error, which the coordinator was told).
absl::Status ServeComputeWorker(const ComputeWorkerOptions& options);

// The peak of this device in FLOP/s, found by a short matrix product with `threads` threads (about 0.2 s).
double MeasurePeakFlops(int threads);

}  // namespace moonpipe
