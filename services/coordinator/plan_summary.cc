#include "services/coordinator/plan_summary.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "moonpipe/runtime/terminal.h"
#include "moonpipe/spec/memory.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {
namespace {

std::string PartInWords(const PartRange& part) {
  std::vector<std::string> words;
  if (part.has_vision) words.push_back("vision tower and projector");
  if (part.has_embedding) words.push_back("embedding");
  if (part.end_layer - part.first_layer == 1) words.push_back(absl::StrCat("layer ", part.first_layer));
  if (part.end_layer - part.first_layer > 1) words.push_back(absl::StrCat("layers ", part.first_layer, "-", part.end_layer - 1));
  if (part.has_head) words.push_back("head and loss");
  return absl::StrJoin(words, ", ");
}

}  // namespace

std::string SummarizePlan(const ClusterPlan& plan, const std::string& run, const cluster::v1::TrainingRunSpec& spec,
                          const ModelConfig& config, double peak_flops) {
  const ParameterCounts counts = CountParameters(config);
  PlanSummary summary;
  summary.run = run;
  summary.model = absl::StrCat(config.architecture == Architecture::kKimiVl ? "kimi_vl" : "deepseek_v3", ", ",
                               config.text.num_hidden_layers, " decoder layers");
  summary.parameters = {{"vision", counts.vision}, {"projector", counts.projector}, {"decoder", counts.decoder}};
  summary.active_parameters = static_cast<uint64_t>(counts.active_decoder);
  summary.steps = spec.train().steps();
  summary.microbatches = spec.pipeline().microbatches();
  summary.tokens_per_step = static_cast<uint64_t>(spec.pipeline().microbatches()) * spec.pipeline().microbatch_tokens();
  summary.schedule = spec.pipeline().schedule();
  summary.peak = peak_flops > 0 ? absl::StrFormat("%.1f GFLOP/s (measured)", peak_flops / 1e9) : "unknown";

  summary.services.push_back({"dataloader", "tokens, pixels and labels", 0, 0, "cpu"});
  auto add = [&](const std::string& name, const PartRange& range, int64_t live) {
    const MemoryEstimate memory =
        EstimateMemory(config, range, {static_cast<int64_t>(spec.pipeline().microbatch_tokens()), live});
    summary.services.push_back({name, PartInWords(range), static_cast<uint64_t>(memory.parameters),
                                static_cast<double>(memory.total_bytes()), "cpu"});
  };
  const auto microbatches = static_cast<int64_t>(spec.pipeline().microbatches());
  const auto stages = static_cast<int64_t>(plan.stages.size());
  if (plan.encoder.has_value()) {
    PartRange vision;
    vision.has_vision = true;
    add("vision encoder", vision, std::min(microbatches, stages + 1));
  }
  for (int64_t stage = 0; stage < stages; ++stage) {
    add(absl::StrCat("decoder stage ", stage), plan.parts[static_cast<size_t>(stage)], std::min(microbatches, stages - stage));
  }
  return FormatPlanSummary(summary);
}

}  // namespace moonpipe
