#include "services/coordinator/run_step_builder.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

data::v1::StepManifest ViewOf(const worker::v1::ModelPart& part, const data::v1::StepManifest& manifest) {
  data::v1::StepManifest view;
  view.set_step(manifest.step());
  for (const data::v1::MicrobatchManifest& full : manifest.microbatches()) {
    data::v1::MicrobatchManifest& one = *view.add_microbatches();
    one.set_index(full.index());
    one.set_tokens(full.tokens());
    *one.mutable_document_lengths() = full.document_lengths();
    if (part.has_head()) one.set_trained_labels(full.trained_labels());
    if (part.has_vision()) {
      *one.mutable_grids() = full.grids();
      one.set_pixel_type(full.pixel_type());
    }
    if (part.has_vision() || part.has_embedding()) one.set_feature_rows(full.feature_rows());
    if (part.has_embedding()) {
      *one.mutable_masked_features() = full.masked_features();
      one.set_has_embeddings(full.has_embeddings());
    }
  }
  return view;
}

}  // namespace

absl::StatusOr<std::map<uint32_t, worker::v1::RunStep>> MakeRunSteps(const ClusterPlan& plan,
                                                                     const data::v1::StepManifest& manifest,
                                                                     bool decode, bool zero_features) {
  if (manifest.microbatches().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("step ", manifest.step(), " has no microbatch"));
  }
  uint64_t trained_labels = 0;
  for (int i = 0; i < manifest.microbatches_size(); ++i) {
    if (manifest.microbatches(i).index() != static_cast<uint32_t>(i)) {
      return absl::InvalidArgumentError(absl::StrCat("step ", manifest.step(), ": microbatch ",
                                                     manifest.microbatches(i).index(), " stands at place ", i,
                                                     " of the manifest"));
    }
    trained_labels += manifest.microbatches(i).trained_labels();
  }
  ScheduleOptions options = plan.schedule_options;
  options.microbatches = manifest.microbatches_size();
  options.forward_only = decode;
  MOONPIPE_ASSIGN_OR_RETURN(const Schedule schedule, MakeSchedule(options));
  MOONPIPE_RETURN_IF_ERROR(ValidateSchedule(schedule));

  std::map<uint32_t, worker::v1::RunStep> steps;
  const std::vector<uint32_t> workers = plan.ScheduleWorkers();
  for (size_t i = 0; i < workers.size(); ++i) {
    worker::v1::RunStep& step = steps[workers[i]];
    step.set_generation(plan.generation);
    step.set_step(manifest.step());
    *step.mutable_manifest() = ViewOf(plan.plans.at(workers[i]).part(), manifest);
    step.set_trained_labels(trained_labels);
    for (const Action& action : schedule.workers[i].actions) step.add_actions(action.ToString());
    step.set_decode(decode);
    step.set_zero_features(zero_features);
  }
  return steps;
}

absl::Status CheckMessagesFit(const ClusterPlan& plan, const ModelConfig& model,
                              const data::v1::StepManifest& manifest) {
  const auto check = [&](const worker::v1::EdgePlan& edge, uint32_t microbatch, uint64_t rows, absl::string_view what) {
    const uint64_t bytes = rows * static_cast<uint64_t>(model.text.hidden_size) * sizeof(float);
    if (bytes <= edge.max_message_bytes()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("step ", manifest.step(), " microbatch ", microbatch, ": edge ", edge.name(), " would carry ",
                     rows, " ", what, " in ", bytes, " bytes, the limit is ", edge.max_message_bytes(),
                     "; raise runtime.max_edge_message_bytes or use smaller microbatches"));
  };
  for (uint32_t worker : plan.ScheduleWorkers()) {
    for (const worker::v1::EdgePlan& edge : plan.plans.at(worker).edges()) {
      if (edge.sender() != worker) continue;
      for (const data::v1::MicrobatchManifest& microbatch : manifest.microbatches()) {
        if (edge.name() == "features") {
          MOONPIPE_RETURN_IF_ERROR(check(edge, microbatch.index(), microbatch.feature_rows(), "feature rows"));
        } else if (absl::StartsWith(edge.name(), "activation.")) {
          MOONPIPE_RETURN_IF_ERROR(check(edge, microbatch.index(), microbatch.tokens(), "token rows"));
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace moonpipe
