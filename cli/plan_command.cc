#include "cli/plan_command.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <filesystem>
#include <iostream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/overrides.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/spec/device_peaks.h"
#include "moonpipe/spec/flavors.h"
#include "moonpipe/train/parameter_groups.h"

namespace moonpipe {
namespace {

using cluster::v1::TrainingRunSpec;

// Where a person gives a model alone and no numbers.
constexpr int64_t kMicrobatchesOfAReplica = 4;
constexpr int64_t kMicrobatchTokens = 4096;

absl::Status ToStatus(absl::string_view what, const std::vector<std::string>& problems) {
  return absl::InvalidArgumentError(absl::StrCat(what, " has ", problems.size(), problems.size() == 1 ? " problem" : " problems", ":\n  ",
                                                 absl::StrJoin(problems, "\n  ")));
}

// A path that is there is what was meant; anything else is a name.
void SetModel(const std::string& model, cluster::v1::ModelSpec* spec) {
  if (std::filesystem::is_directory(model)) {
    spec->set_path(model);
  } else if (std::filesystem::exists(model) || absl::StrContains(model, '/') || absl::EndsWith(model, ".json")) {
    spec->set_config(model);
  } else {
    spec->set_flavor(model);
  }
}

std::vector<std::string> AllOverrides(const PlanArguments& arguments) {
  std::vector<std::string> overrides = arguments.overrides;
  if (arguments.stages.has_value()) overrides.push_back(absl::StrCat("pipeline.stages=", *arguments.stages));
  if (arguments.microbatches.has_value()) overrides.push_back(absl::StrCat("pipeline.microbatches=", *arguments.microbatches));
  if (arguments.microbatch_tokens.has_value()) {
    overrides.push_back(absl::StrCat("pipeline.microbatch_tokens=", *arguments.microbatch_tokens));
  }
  if (arguments.schedule.has_value()) overrides.push_back(absl::StrCat("pipeline.schedule=", *arguments.schedule));
  if (!arguments.layers_per_stage.empty()) {
    overrides.push_back(absl::StrCat("pipeline.layers_per_stage=[", absl::StrJoin(arguments.layers_per_stage, ","), "]"));
    if (!arguments.stages.has_value()) overrides.push_back(absl::StrCat("pipeline.stages=", arguments.layers_per_stage.size()));
  }
  return overrides;
}

// A model alone has no data and no optimizer; what a plan does not read may be missing.
absl::StatusOr<TrainingRunSpec> SpecOfModel(const PlanArguments& arguments) {
  TrainingRunSpec spec;
  SetModel(arguments.model, spec.mutable_model());
  std::vector<std::string> problems;
  for (const std::string& text : AllOverrides(arguments)) {
    SpecReader reader(absl::StrCat("--set ", text), /*with_position=*/false);
    ApplyOverride(text, &reader, &spec);
    for (const SpecProblem& problem : reader.problems()) problems.push_back(absl::StrCat(problem.field, ": ", problem.description));
  }
  if (!spec.pipeline().has_microbatch_tokens()) spec.mutable_pipeline()->set_microbatch_tokens(kMicrobatchTokens);
  if (!spec.pipeline().has_microbatches()) {
    // At least one a replica, whatever nonsense was typed: that is refused later, with the numbers.
    const int64_t replicas = std::clamp<int64_t>(arguments.parallel.replicas(), 1, 1 << 14);
    spec.mutable_pipeline()->set_microbatches(static_cast<uint32_t>(kMicrobatchesOfAReplica * replicas));
  }
  ResolveDefaults(&spec);
  for (const FieldViolation& violation : ValidateSpec(spec)) {
    for (const char* part : {"model", "pipeline", "vision", "optimizer.groups"}) {
      if (absl::StartsWith(violation.field, part)) {
        problems.push_back(absl::StrCat(violation.field, ": ", violation.description));
        break;
      }
    }
  }
  if (!problems.empty()) return ToStatus("the plan", problems);
  return spec;
}

absl::StatusOr<common::v1::MediaGrid> ParseGrid(const std::string& text) {
  std::vector<uint32_t> numbers;
  for (absl::string_view part : absl::StrSplit(text, absl::ByAnyChar("xX"))) {
    uint32_t number = 0;
    if (!absl::SimpleAtoi(part, &number) || number == 0 || number > (1u << 16)) break;
    numbers.push_back(number);
  }
  if (numbers.size() == 2) numbers.insert(numbers.begin(), 1);
  if (numbers.size() != 3 || std::count(text.begin(), text.end(), 'x') + std::count(text.begin(), text.end(), 'X') > 2) {
    return absl::InvalidArgumentError(absl::StrCat("grid \"", text, "\" is not ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS in patches, for example 32x32"));
  }
  common::v1::MediaGrid grid;
  grid.set_frames(numbers[0]);
  grid.set_rows(numbers[1]);
  grid.set_columns(numbers[2]);
  return grid;
}

int64_t RowsOf(const ModelConfig& config, const common::v1::MediaGrid& grid) {
  return int64_t{grid.rows()} * grid.columns() / (config.vision->merge_height * config.vision->merge_width);
}

void CheckGrid(const ModelConfig& config, const common::v1::MediaGrid& grid, const std::string& where, std::vector<std::string>* problems) {
  const VisionConfig& vision = *config.vision;
  const auto multiple = [&](const char* axis, int64_t size, int64_t window) {
    if (size % window == 0 && size > 0) return;
    const int64_t below = size / window * window;
    problems->push_back(absl::StrCat(where, "grid has ", size, " ", axis, ", no multiple of the window of ", window, "; the nearest are ",
                                     below > 0 ? absl::StrCat(below, " and ") : "", below + window));
  };
  multiple("rows", grid.rows(), vision.merge_height);
  multiple("columns", grid.columns(), vision.merge_width);
  if (grid.frames() < 1 || grid.frames() > vision.init_pos_emb_time) {
    problems->push_back(absl::StrCat(where, "grid has ", grid.frames(), " frames; this tower takes 1 to ", vision.init_pos_emb_time));
  }
}

// Full microbatches of one document each, with equal pictures.
absl::StatusOr<data::v1::StepManifest> FullStep(const PlanArguments& arguments, const ModelConfig& config, const TrainingRunSpec& spec,
                                                std::vector<std::string>* problems) {
  MOONPIPE_ASSIGN_OR_RETURN(const common::v1::MediaGrid grid, ParseGrid(arguments.grid));
  const int64_t tokens = spec.pipeline().microbatch_tokens();
  int64_t pictures = arguments.pictures.value_or(0);
  int64_t rows = 0;
  if (config.vision.has_value()) {
    const size_t before = problems->size();
    CheckGrid(config, grid, "", problems);
    if (problems->size() > before) return data::v1::StepManifest();
    rows = RowsOf(config, grid);
    if (!arguments.pictures.has_value()) pictures = rows <= tokens ? 1 : 0;
    if (pictures * rows > tokens) {
      problems->push_back(absl::StrCat(pictures, " pictures of ", rows, " positions take ", pictures * rows, " of a microbatch's ", tokens,
                                       " tokens; at most ", tokens / rows, " fit"));
      return data::v1::StepManifest();
    }
  } else if (pictures != 0) {
    problems->push_back(absl::StrCat(pictures, " pictures for a model without a vision tower; it takes 0"));
    return data::v1::StepManifest();
  }
  if (pictures < 0) problems->push_back(absl::StrCat(pictures, " pictures; the least is 0"));
  data::v1::StepManifest manifest;
  for (uint32_t m = 0; m < spec.pipeline().microbatches(); ++m) {
    data::v1::MicrobatchManifest& microbatch = *manifest.add_microbatches();
    microbatch.set_index(m);
    microbatch.set_tokens(static_cast<uint32_t>(tokens));
    microbatch.add_document_lengths(static_cast<uint32_t>(tokens));
    for (int64_t i = 0; i < pictures; ++i) *microbatch.add_grids() = grid;
    microbatch.set_feature_rows(static_cast<uint32_t>(pictures * rows));
  }
  return manifest;
}

absl::StatusOr<data::v1::StepManifest> ReadManifest(const std::string& path, const ModelConfig& config, std::vector<std::string>* problems) {
  MOONPIPE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  data::v1::StepManifest manifest;
  if (const auto parsed = google::protobuf::util::JsonStringToMessage(text, &manifest); !parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": no step manifest in JSON: ", std::string(parsed.message())));
  }
  if (manifest.microbatches().empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": the step has no microbatch"));
  for (int m = 0; m < manifest.microbatches_size(); ++m) {
    const auto& microbatch = manifest.microbatches(m);
    const std::string where = absl::StrCat(path, ": microbatch ", m, ": ");
    uint64_t tokens = 0;
    for (const uint32_t length : microbatch.document_lengths()) tokens += length;
    if (tokens > microbatch.tokens()) {
      problems->push_back(absl::StrCat(where, "documents of ", tokens, " tokens, but it has ", microbatch.tokens()));
    }
    if (!microbatch.grids().empty() && !config.vision.has_value()) {
      problems->push_back(absl::StrCat(where, microbatch.grids_size(), " pictures for a model without a vision tower; it takes 0"));
      continue;
    }
    int64_t rows = 0;
    for (const auto& grid : microbatch.grids()) {
      CheckGrid(config, grid, where, problems);
      rows += RowsOf(config, grid);
    }
    if (rows != microbatch.feature_rows()) {
      problems->push_back(absl::StrCat(where, "its pictures give ", rows, " feature rows, feature_rows is ", microbatch.feature_rows()));
    }
  }
  return manifest;
}

void FillSizes(const data::v1::StepManifest& manifest, EstimateInputs* inputs) {
  inputs->patches = 0;
  for (const auto& microbatch : manifest.microbatches()) {
    int64_t patches = 0;
    for (const auto& grid : microbatch.grids()) patches += int64_t{grid.frames()} * grid.rows() * grid.columns();
    inputs->patches = std::max(inputs->patches, patches);
    inputs->microbatch_tokens = std::max(inputs->microbatch_tokens, int64_t{microbatch.tokens()});
  }
}

}  // namespace

absl::StatusOr<PlanReport> MakePlanReport(const PlanArguments& arguments) {
  if (arguments.run_file.empty() == arguments.model.empty()) {
    return absl::InvalidArgumentError("name a run file or --model, one of the two");
  }
  PlanReport report;
  report.parallel = arguments.parallel;
  if (arguments.run_file.empty()) {
    MOONPIPE_ASSIGN_OR_RETURN(report.spec, SpecOfModel(arguments));
    report.model = arguments.model;
  } else {
    MOONPIPE_ASSIGN_OR_RETURN(report.spec, LoadRunFile(arguments.run_file, AllOverrides(arguments)));
    const cluster::v1::ModelSpec& model = report.spec.model();
    report.model = model.has_path() ? model.path() : model.has_config() ? model.config() : model.flavor();
  }
  TrainingRunSpec& spec = report.spec;
  MOONPIPE_ASSIGN_OR_RETURN(report.config, ReadModelOf(spec.model()));
  const ModelConfig& config = report.config;

  std::vector<std::string> problems;
  if (arguments.manifest.empty()) {
    MOONPIPE_ASSIGN_OR_RETURN(report.manifest, FullStep(arguments, config, spec, &problems));
  } else {
    MOONPIPE_ASSIGN_OR_RETURN(report.manifest, ReadManifest(arguments.manifest, config, &problems));
    spec.mutable_pipeline()->set_microbatches(static_cast<uint32_t>(report.manifest.microbatches_size()));
  }
  EstimateInputs inputs;
  FillSizes(report.manifest, &inputs);
  inputs.microbatch_tokens = std::max<int64_t>(inputs.microbatch_tokens, arguments.manifest.empty() ? spec.pipeline().microbatch_tokens() : 1);
  for (std::string& problem :
       CheckParallel(config, arguments.parallel, spec.pipeline().microbatches(), inputs.microbatch_tokens)) {
    problems.push_back(std::move(problem));
  }
  const bool in_first_stage = spec.vision().placement() == cluster::v1::VisionSpec::PLACEMENT_FIRST_STAGE;
  auto parts = PartsOfStages(config, static_cast<int32_t>(spec.pipeline().stages()),
                             {spec.pipeline().layers_per_stage().begin(), spec.pipeline().layers_per_stage().end()}, in_first_stage);
  if (!parts.ok()) problems.emplace_back(parts.status().message());
  if (!problems.empty()) return ToStatus("the plan", problems);

  inputs.parts = *parts;
  inputs.parallel = arguments.parallel;
  inputs.manifest = report.manifest;
  inputs.gradient_groups = spec.train().gradient_groups();
  inputs.recompute = RecomputeOf(spec.train().recompute());
  inputs.schedule.name = spec.pipeline().schedule();
  inputs.schedule.stages = static_cast<int32_t>(spec.pipeline().stages());
  inputs.schedule.microbatches = static_cast<int32_t>(spec.pipeline().microbatches() / arguments.parallel.replicas());
  inputs.schedule.has_vision = config.vision.has_value();
  inputs.schedule.vision_in_first_stage = config.vision.has_value() && in_first_stage;
  inputs.schedule.tied_embeddings = config.text.tie_word_embeddings;
  const std::vector<TensorSpec> tensors = ListTensors(config);
  MOONPIPE_ASSIGN_OR_RETURN(const std::vector<UpdateRule> rules, AssignUpdateRules(spec.optimizer(), tensors, tensors));
  std::vector<bool> moves;
  for (const UpdateRule& rule : rules) {
    moves.push_back(!rule.frozen);
    inputs.frozen_tensors.push_back(rule.frozen);
    inputs.muon_tensors.push_back(rule.kind == UpdateKind::kMuon);
  }
  inputs.frozen = FindFrozenParts(config, tensors, moves);
  MOONPIPE_ASSIGN_OR_RETURN(report.estimate, EstimatePlan(config, inputs));
  report.parts = inputs.parts;
  report.schedule = inputs.schedule;
  report.device = arguments.device;
  if (const auto peak = FindDevicePeak(arguments.device); !arguments.device.empty() && peak.has_value()) {
    report.device_peak = peak->flops_per_second;
  }
  for (const auto& [name, size] : {std::pair<const char*, int64_t>{"data", arguments.parallel.data},
                                   {"expert", arguments.parallel.expert},
                                   {"tensor", arguments.parallel.tensor},
                                   {"context", arguments.parallel.context}}) {
    if (size != 1) report.beyond_runs.push_back(absl::StrCat(name, " ", size, " is counted by formula; a run takes 1"));
  }
  return report;
}

absl::Status PlanCommand(const PlanArguments& arguments) {
  MOONPIPE_ASSIGN_OR_RETURN(const PlanReport report, MakePlanReport(arguments));
  std::cout << (arguments.format == "json" ? FormatPlanJson(report) : FormatPlanText(report));
  return absl::OkStatus();
}

}  // namespace moonpipe
