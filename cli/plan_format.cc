// The two outputs of `moonpipe plan`.
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cli/plan_command.h"
#include "moonpipe/runtime/terminal.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kRunsAccept[] =
    "pipeline.stages, pipeline.layers_per_stage, pipeline.microbatches, pipeline.microbatch_tokens, pipeline.schedule and vision.placement";

// Whole as long as 64 bits hold it.
Json ToJson(absl::int128 number) {
  if (number <= std::numeric_limits<int64_t>::max()) return static_cast<int64_t>(number);
  if (number <= std::numeric_limits<uint64_t>::max()) return static_cast<uint64_t>(number);
  return static_cast<double>(number);
}

Json ToJson(const StepFlops& flops) {
  return Json{{"total", ToJson(flops.total())}, {"decoder", ToJson(flops.decoder)}, {"vision", ToJson(flops.vision)},
              {"projector", ToJson(flops.projector)}};
}

std::string InWords(absl::int128 flops) {
  constexpr const char* kUnits[] = {"", "K", "M", "G", "T", "P", "E", "Z"};
  auto value = static_cast<double>(flops);
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  return absl::StrFormat("%.4g %sFLOP", value, kUnits[unit]);
}

std::string Count(int64_t number) { return FormatCount(static_cast<uint64_t>(number)); }

struct StepSizes {
  int64_t tokens = 0, documents = 0, pictures = 0, patches = 0, feature_rows = 0;
};

StepSizes SizesOf(const data::v1::StepManifest& manifest) {
  StepSizes sizes;
  for (const auto& microbatch : manifest.microbatches()) {
    sizes.tokens += microbatch.tokens();
    sizes.documents += microbatch.document_lengths_size();
    sizes.pictures += microbatch.grids_size();
    for (const auto& grid : microbatch.grids()) sizes.patches += int64_t{grid.frames()} * grid.rows() * grid.columns();
    sizes.feature_rows += microbatch.feature_rows();
  }
  return sizes;
}

std::string FirstSet(const std::string& value, const char* fallback) { return value.empty() ? fallback : value; }

}  // namespace

std::string FormatPlanJson(const PlanReport& report) {
  const ModelConfig& config = report.config;
  const cluster::v1::ModelSpec& model = report.spec.model();
  const ParameterCounts& counts = report.estimate.parameters;
  const StepSizes sizes = SizesOf(report.manifest);
  Json out;
  out["model"] = {{"name", report.model},
                  {"architecture", std::string(ArchitectureName(config.architecture))},
                  {"layers", config.text.num_hidden_layers},
                  {"experts", FirstSet(model.experts(), "grouped")},
                  {"attention", FirstSet(model.attention(), "fused")},
                  {"norm_rounding", FirstSet(model.norm_rounding(), "before_weight")}};
  out["parameters"] = {{"total", counts.total()},
                       {"vision", counts.vision},
                       {"projector", counts.projector},
                       {"decoder", counts.decoder},
                       {"embedding", counts.embedding},
                       {"head", counts.head},
                       {"routed_experts", counts.routed_experts},
                       {"active_per_token", counts.active_decoder},
                       {"active_per_token_without_embedding", counts.active_decoder - counts.embedding}};
  out["parallel"] = {{"stages", report.parts.size()},          {"data", report.parallel.data},
                     {"expert", report.parallel.expert},       {"tensor", report.parallel.tensor},
                     {"context", report.parallel.context},     {"devices", report.estimate.num_devices},
                     {"schedule", report.schedule.name}};
  std::vector<int64_t> layers;
  for (const PartRange& part : report.parts) layers.push_back(part.end_layer - part.first_layer);
  out["layers_per_stage"] = layers;
  out["step"] = {{"microbatches", report.manifest.microbatches_size()},
                 {"tokens", sizes.tokens},
                 {"documents", sizes.documents},
                 {"pictures", sizes.pictures},
                 {"patches", sizes.patches},
                 {"feature_rows", sizes.feature_rows}};
  out["flops_per_step"] = ToJson(report.estimate.flops);
  out["devices"] = Json::array();
  int64_t most = 0;
  for (const DeviceEstimate& device : report.estimate.devices) {
    const MemoryEstimate& memory = device.memory;
    most = std::max(most, memory.total_bytes());
    out["devices"].push_back({{"name", device.name},
                              {"devices", device.devices},
                              {"part", PartInWords(device.part)},
                              {"layers", device.part.end_layer - device.part.first_layer},
                              {"first_layer", device.part.first_layer},
                              {"parameters", memory.parameters},
                              {"live_microbatches", device.live_microbatches},
                              {"memory_bytes",
                               {{"total", memory.total_bytes()},
                                {"weights", memory.weights_bytes},
                                {"gradients", memory.gradients_bytes},
                                {"optimizer", memory.optimizer_bytes},
                                {"activations", memory.activations_bytes},
                                {"working", memory.working_bytes}}},
                              {"flops_per_step", ToJson(device.flops)}});
  }
  out["memory_bytes_per_device"] = most;
  out["device"] = report.device.empty() ? Json("unknown") : Json(report.device);
  out["device_peak_flops_per_second"] = report.device_peak.has_value() ? Json(*report.device_peak) : Json("unknown");
  if (report.device_peak.has_value()) {
    out["seconds_per_step_at_peak"] =
        static_cast<double>(report.estimate.flops.total()) / (static_cast<double>(report.estimate.num_devices) * *report.device_peak);
  }
  out["estimate"] = {{"run_accepts", report.beyond_runs.empty()}, {"why_not", report.beyond_runs}, {"runs_take", kRunsAccept}};
  return out.dump(2) + "\n";
}

std::string FormatPlanText(const PlanReport& report) {
  const ModelConfig& config = report.config;
  const cluster::v1::ModelSpec& model = report.spec.model();
  const ParameterCounts& counts = report.estimate.parameters;
  const StepSizes sizes = SizesOf(report.manifest);
  std::string text = absl::StrCat("model       ", report.model, " (", ArchitectureName(config.architecture), "), ",
                                  config.text.num_hidden_layers, " decoder layers\n");
  absl::StrAppend(&text, "computed    model.experts ", FirstSet(model.experts(), "grouped"), ", model.attention ",
                  FirstSet(model.attention(), "fused"), ", model.norm_rounding ", FirstSet(model.norm_rounding(), "before_weight"), "\n");
  absl::StrAppend(&text, "parameters  ", Count(counts.total()), " in total: vision ", Count(counts.vision), ", projector ",
                  Count(counts.projector), ", decoder ", Count(counts.decoder), "\n");
  absl::StrAppend(&text, "            decoder: embedding ", Count(counts.embedding), ", head ", Count(counts.head), ", routed experts ",
                  Count(counts.routed_experts), "\n");
  absl::StrAppend(&text, "            ", Count(counts.active_decoder), " active for a token, ", Count(counts.active_decoder - counts.embedding),
                  " without the input embedding\n");
  absl::StrAppend(&text, "step        ", report.manifest.microbatches_size(), " microbatches, ", Count(sizes.tokens), " tokens in ",
                  Count(sizes.documents), " documents, ", Count(sizes.pictures), " pictures of ", Count(sizes.patches), " patches and ",
                  Count(sizes.feature_rows), " positions; schedule ", report.schedule.name, "\n");
  const StepFlops& flops = report.estimate.flops;
  absl::StrAppend(&text, "FLOPs       ", InWords(flops.total()), " a step: decoder ", InWords(flops.decoder), ", vision ",
                  InWords(flops.vision), ", projector ", InWords(flops.projector), "\n");
  absl::StrAppend(&text, "devices     ", report.estimate.num_devices, ": stages ", report.parts.size(), ", data ", report.parallel.data,
                  ", expert ", report.parallel.expert, ", tensor ", report.parallel.tensor, ", context ", report.parallel.context, "\n");
  std::vector<int64_t> layers;
  for (const PartRange& part : report.parts) layers.push_back(part.end_layer - part.first_layer);
  absl::StrAppend(&text, "layers      ", absl::StrJoin(layers, ", "), "\n");
  const std::string peak = report.device_peak.has_value() ? absl::StrFormat("%.4g TFLOP/s a device (bf16, dense)", *report.device_peak / 1e12)
                                                          : "unknown";
  absl::StrAppend(&text, "peak        ", peak);
  if (report.device_peak.has_value()) {
    absl::StrAppendFormat(&text, "; a step takes at least %.4g s",
                          static_cast<double>(flops.total()) / (static_cast<double>(report.estimate.num_devices) * *report.device_peak));
  }
  absl::StrAppend(&text, "\n\n");

  std::vector<std::vector<std::string>> rows = {
      {"device", "of them", "part", "parameters", "weights", "gradients", "moments", "activations", "working", "memory", "FLOPs"}};
  for (const DeviceEstimate& device : report.estimate.devices) {
    const MemoryEstimate& memory = device.memory;
    const auto bytes = [](int64_t size) { return FormatGiB(static_cast<double>(size)); };
    rows.push_back({device.name, Count(device.devices), PartInWords(device.part), Count(memory.parameters), bytes(memory.weights_bytes),
                    bytes(memory.gradients_bytes), bytes(memory.optimizer_bytes), bytes(memory.activations_bytes),
                    bytes(memory.working_bytes), bytes(memory.total_bytes()), InWords(device.flops.total())});
  }
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const bool words = i == 0 || i == 2;
      absl::StrAppendFormat(&line, words ? "%s%-*s" : "%s%*s", i == 0 ? "" : "  ", static_cast<int>(widths[i]), row[i]);
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    absl::StrAppend(&text, line, "\n");
  }
  if (!report.beyond_runs.empty()) {
    absl::StrAppend(&text, "\nAn estimate by formula: no run accepts this plan today.\n  ", absl::StrJoin(report.beyond_runs, "\n  "),
                    "\n  a run takes ", kRunsAccept, "\n");
  }
  return text;
}

}  // namespace moonpipe
