// What must pass each edge in a step, by the manifest alone, and whether it did.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "moonpipe/data/v1/manifest.pb.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/worker/v1/worker_service.pb.h"
#include "services/coordinator/plan_builder.h"

namespace moonpipe {

// Payload bytes by edge name: an activation and its gradient are tokens x hidden_size x 4, features and their gradients
// feature_rows x hidden_size x 4, a tied gradient vocab_size x hidden_size x 4.
std::map<std::string, uint64_t> ExpectedEdgeBytes(const ClusterPlan& plan,
                                                  const data::v1::StepManifest& manifest, const ModelConfig& config);

// INTERNAL with edge and both numbers when a worker counted other bytes than the manifest demands: then something else than this step's
// tensors was trained on.
absl::Status CheckEdgeTraffic(const ClusterPlan& plan, const data::v1::StepManifest& manifest,
                              const ModelConfig& config, const std::map<uint32_t, worker::v1::StepReport>& reports);

}  // namespace moonpipe
