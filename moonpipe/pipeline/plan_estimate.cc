#include "moonpipe/pipeline/plan_estimate.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/pipeline/stage_split.h"

namespace moonpipe {
namespace {

// Most forwards of a chunk that wait for their backward, at any moment of the worker's list.
int64_t MostLive(const WorkerActions& worker, int32_t chunk) {
  int64_t live = 0;
  int64_t most = 1;
  for (const Action& action : worker.actions) {
    if (action.chunk != chunk) continue;
    if (action.type == ActionType::kForward) most = std::max(most, ++live);
    if (action.type == ActionType::kBackward) --live;
  }
  return most;
}

bool Contains(const PartRange& range, bool tied, const TensorSpec& tensor) {
  if (tensor.part != ModelPartKind::kDecoder) return range.has_vision;
  if (tensor.layer >= 0) return tensor.layer >= range.first_layer && tensor.layer < range.end_layer;
  const bool embedding = tensor.name.find("embed_tokens") != std::string::npos;
  return embedding ? range.has_embedding || (tied && range.has_head) : range.has_head;
}

// The devices of a stage share its work evenly: experts are taken for balanced.
StepFlops DividedBy(const StepFlops& flops, int64_t devices) {
  return {flops.vision / devices, flops.projector / devices, flops.decoder / devices};
}

}  // namespace

absl::StatusOr<std::vector<PartRange>> PartsOfStages(const ModelConfig& config, int32_t stages,
                                                     const std::vector<uint32_t>& layers_per_stage, bool vision_in_first_stage) {
  std::vector<PartRange> parts;
  if (layers_per_stage.empty()) {
    MOONPIPE_ASSIGN_OR_RETURN(parts, SplitLayers(CostsOf(config), stages));
  } else {
    MOONPIPE_ASSIGN_OR_RETURN(parts, SplitLayersAs(layers_per_stage, config.text.num_hidden_layers, stages));
  }
  parts[0].has_vision = config.vision.has_value() && vision_in_first_stage;
  return parts;
}

absl::StatusOr<PlanEstimate> EstimatePlan(const ModelConfig& config, const EstimateInputs& inputs) {
  MOONPIPE_ASSIGN_OR_RETURN(const Schedule schedule, MakeSchedule(inputs.schedule));
  PlanEstimate plan;
  plan.parameters = CountParameters(config);
  const int64_t replicas = inputs.parallel.replicas();
  const std::vector<TensorSpec> tensors = ListTensors(config);
  auto add = [&](const std::string& name, const PartRange& part, const WorkerActions& worker, bool divided) {
    DeviceEstimate device;
    device.name = name;
    device.part = part;
    MemoryOptions memory;
    memory.microbatch_tokens = inputs.microbatch_tokens;
    memory.patches = inputs.patches;
    memory.gradient_groups = inputs.gradient_groups;
    memory.recompute = inputs.recompute;
    // The tower's own service is whole in each replica.
    if (divided) memory.parallel = inputs.parallel;
    for (const int32_t chunk : worker.chunks) device.live_microbatches = std::max(device.live_microbatches, MostLive(worker, chunk));
    memory.live_microbatches = device.live_microbatches;
    const auto is = [](const std::vector<bool>& flags, size_t i) { return i < flags.size() && flags[i]; };
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].trainable || !Contains(part, config.text.tie_word_embeddings, tensors[i])) continue;
      const int64_t elements = ElementsPerDevice(tensors[i], memory.parallel);
      if (is(inputs.frozen_tensors, i)) {
        memory.frozen_parameters += elements;
      } else if (is(inputs.muon_tensors, i)) {
        memory.one_moment_parameters += elements;
      }
    }
    device.memory = EstimateMemory(config, part, memory);
    const StepFlops share = CountTrainingFlops(config, part, inputs.manifest, inputs.frozen);
    plan.flops.vision += share.vision;
    plan.flops.projector += share.projector;
    plan.flops.decoder += share.decoder;
    device.devices = divided ? inputs.parallel.devices_per_stage() : replicas;
    device.flops = DividedBy(share, device.devices);
    plan.num_devices += device.devices;
    plan.devices.push_back(std::move(device));
  };
  const bool own_encoder = schedule.workers.size() > inputs.parts.size();
  if (own_encoder) {
    PartRange tower;
    tower.has_vision = true;
    add("vision encoder", tower, schedule.workers[0], /*divided=*/false);
  }
  for (size_t stage = 0; stage < inputs.parts.size(); ++stage) {
    add(absl::StrCat("decoder stage ", stage), inputs.parts[stage], schedule.workers[stage + (own_encoder ? 1 : 0)], /*divided=*/true);
  }
  return plan;
}

std::string PartInWords(const PartRange& part) {
  std::vector<std::string> words;
  if (part.has_vision) words.push_back("vision tower and projector");
  if (part.has_embedding) words.push_back("embedding");
  if (part.end_layer - part.first_layer == 1) words.push_back(absl::StrCat("layer ", part.first_layer));
  if (part.end_layer - part.first_layer > 1) words.push_back(absl::StrCat("layers ", part.first_layer, "-", part.end_layer - 1));
  if (part.has_head) words.push_back("head and loss");
  return absl::StrJoin(words, ", ");
}

}  // namespace moonpipe
