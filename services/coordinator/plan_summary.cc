#include "services/coordinator/plan_summary.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/pipeline/plan_estimate.h"
#include "moonpipe/runtime/terminal.h"

namespace moonpipe {

absl::StatusOr<std::string> SummarizePlan(const ClusterPlan& plan, const std::string& run, const cluster::v1::TrainingRunSpec& spec,
                                          const ModelConfig& config, const std::vector<UpdateRule>& rules, double peak_flops) {
  EstimateInputs inputs;
  inputs.schedule = plan.schedule_options;
  inputs.parts = plan.parts;
  inputs.microbatch_tokens = static_cast<int64_t>(spec.pipeline().microbatch_tokens());
  inputs.gradient_groups = static_cast<int64_t>(spec.train().gradient_groups());
  inputs.recompute = RecomputeOf(spec.train().recompute());
  for (const UpdateRule& rule : rules) {
    inputs.frozen_tensors.push_back(rule.frozen);
    inputs.muon_tensors.push_back(rule.kind == UpdateKind::kMuon);
  }
  MOONPIPE_ASSIGN_OR_RETURN(const PlanEstimate estimate, EstimatePlan(config, inputs));
  PlanSummary summary;
  summary.run = run;
  summary.model = absl::StrCat(ArchitectureName(config.architecture), ", ", config.text.num_hidden_layers, " decoder layers");
  summary.parameters = {{"vision", estimate.parameters.vision},
                        {"projector", estimate.parameters.projector},
                        {"decoder", estimate.parameters.decoder}};
  summary.active_parameters = static_cast<uint64_t>(estimate.parameters.active_decoder);
  summary.steps = spec.train().steps();
  summary.microbatches = spec.pipeline().microbatches();
  summary.tokens_per_step = static_cast<uint64_t>(spec.pipeline().microbatches()) * spec.pipeline().microbatch_tokens();
  summary.schedule = spec.pipeline().schedule();
  summary.peak = peak_flops > 0 ? absl::StrFormat("%.1f GFLOP/s (measured)", peak_flops / 1e9) : "unknown";

  summary.services.push_back({"dataloader", "tokens, pixels and labels", 0, 0, "cpu"});
  for (const DeviceEstimate& device : estimate.devices) {
    summary.services.push_back({device.name, PartInWords(device.part), static_cast<uint64_t>(device.memory.parameters),
                                static_cast<double>(device.memory.total_bytes()), "cpu"});
  }
  return FormatPlanSummary(summary);
}

}  // namespace moonpipe
