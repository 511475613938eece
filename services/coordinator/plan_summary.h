// A plan in words, printed before the first step.
#pragma once

#include <string>

#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/spec/model_config.h"
#include "services/coordinator/plan_builder.h"

namespace moonpipe {

// Services with their parts, parameters and estimated memory; the model's parameters by part; tokens of a step. `peak_flops` is the sum
// over the devices, 0 or less where not known. Several lines.
std::string SummarizePlan(const ClusterPlan& plan, const std::string& run, const cluster::v1::TrainingRunSpec& spec,
                          const ModelConfig& config, double peak_flops);

}  // namespace moonpipe
