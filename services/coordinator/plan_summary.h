// A plan in words, printed before the first step.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/train/parameter_groups.h"
#include "services/coordinator/plan_builder.h"

namespace moonpipe {

// Services with their parts, parameters and estimated memory; the model's parameters by part; tokens of a step. `peak_flops` is the sum
// over the devices, 0 or less where not known; `rules` are one a tensor of the whole model. Several lines.
absl::StatusOr<std::string> SummarizePlan(const ClusterPlan& plan, const std::string& run, const cluster::v1::TrainingRunSpec& spec,
                                          const ModelConfig& config, const std::vector<UpdateRule>& rules, double peak_flops);

}  // namespace moonpipe
