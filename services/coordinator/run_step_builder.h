// From a step's manifest to the RunStep of every computing worker: its actions and no more of the manifest than it
// needs. Pure.
#pragma once

#include <map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "moonpipe/data/v1/manifest.pb.h"
#include "moonpipe/worker/v1/worker_service.pb.h"
#include "services/coordinator/plan_builder.h"

namespace moonpipe {

// By worker number; the dataloader has none. Everybody sees tokens and document lengths; the tower's owner and stage 0
// see feature rows, only the tower's owner grids, only the last stage trained labels. Samples, skips, cursor and digest
// stay with the coordinator. `decode` makes a forward-only schedule over as many microbatches as the manifest has;
// `zero_features` belongs to it. INVALID_ARGUMENT for a manifest without microbatches or with one out of order.
absl::StatusOr<std::map<uint32_t, worker::v1::RunStep>> MakeRunSteps(const ClusterPlan& plan,
                                                                     const data::v1::StepManifest& manifest,
                                                                     bool decode = false, bool zero_features = false);

// Refuses a step before it runs when a message of it would be over the limit of its edges: features of fp32
// [feature_rows, hidden] and activations of fp32 [tokens, hidden]. FAILED_PRECONDITION names the microbatch, both sizes
// and the setting.
absl::Status CheckMessagesFit(const ClusterPlan& plan, const ModelConfig& model,
                              const data::v1::StepManifest& manifest);

}  // namespace moonpipe
