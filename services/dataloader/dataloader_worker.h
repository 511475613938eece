// The dataloader's part in a run: it makes the steps that the coordinator asks for, in order from the plan's cursor, holds them for
// the workers that fetch them, and publishes their manifests. One thread.
#pragma once

#include "absl/status/status.h"
#include "moonpipe/metrics/registry.h"
#include "moonpipe/runtime/coordinator_client.h"
#include "services/dataloader/dataloader_service.h"

namespace moonpipe {

// Serves until the coordinator drains the worker (OK) or the worker cannot go on (the error, which the coordinator was told).
absl::Status ServeDataloader(CoordinatorClient* client, DataloaderService* service, MetricsRegistry* registry);

}  // namespace moonpipe
