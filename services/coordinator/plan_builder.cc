#include "services/coordinator/plan_builder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/pipeline/plan_estimate.h"

namespace moonpipe {
namespace {

using common::v1::WorkerRole;

constexpr uint64_t kDefaultMaxMessageBytes = uint64_t{1} << 30;

// Workers of a role in the order in which they take its places.
std::vector<const RegisteredWorker*> WorkersOf(const std::vector<RegisteredWorker>& workers, WorkerRole role) {
  std::vector<const RegisteredWorker*> found;
  for (const RegisteredWorker& worker : workers) {
    if (worker.registration.role() == role) found.push_back(&worker);
  }
  std::sort(found.begin(), found.end(), [](const RegisteredWorker* a, const RegisteredWorker* b) {
    return std::make_pair(a->registration.ordinal(), a->worker) < std::make_pair(b->registration.ordinal(), b->worker);
  });
  return found;
}

std::string Token(const PlanInputs& inputs, absl::string_view use) {
  // Lengths keep the fields apart.
  return Sha256Hex(absl::StrCat(inputs.secret.size(), ":", inputs.secret, inputs.run.size(), ":", inputs.run,
                                inputs.generation, ":", use));
}

struct Cast {
  const RegisteredWorker* dataloader = nullptr;
  const RegisteredWorker* encoder = nullptr;
  std::vector<const RegisteredWorker*> stages;
};

absl::StatusOr<Cast> ChooseWorkers(const PlanInputs& inputs, size_t num_stages, bool needs_encoder) {
  const auto dataloaders = WorkersOf(inputs.workers, common::v1::WORKER_ROLE_DATALOADER);
  const auto encoders = WorkersOf(inputs.workers, common::v1::WORKER_ROLE_VISION_ENCODER);
  const auto stages = WorkersOf(inputs.workers, common::v1::WORKER_ROLE_DECODER_STAGE);
  std::vector<std::string> missing;
  if (dataloaders.empty()) missing.push_back("a dataloader");
  if (needs_encoder && encoders.empty()) missing.push_back("a vision encoder");
  if (stages.size() < num_stages) {
    missing.push_back(absl::StrCat(num_stages - stages.size(), " of ", num_stages, " decoder stages"));
  }
  if (!missing.empty()) return absl::UnavailableError(absl::StrCat("waits for ", absl::StrJoin(missing, ", ")));
  Cast cast;
  cast.dataloader = dataloaders[0];
  if (needs_encoder) cast.encoder = encoders[0];
  cast.stages.assign(stages.begin(), stages.begin() + static_cast<std::ptrdiff_t>(num_stages));
  return cast;
}

std::vector<worker::v1::EdgePlan> AllEdges(const ClusterPlan& plan, bool tied, uint64_t max_message_bytes) {
  std::vector<worker::v1::EdgePlan> edges;
  const auto add = [&](const std::string& name, uint32_t sender, uint32_t receiver) {
    worker::v1::EdgePlan edge;
    edge.set_name(name);
    edge.set_sender(sender);
    edge.set_receiver(receiver);
    edge.set_max_message_bytes(max_message_bytes);
    edges.push_back(std::move(edge));
  };
  const std::vector<uint32_t>& stages = plan.stages;
  if (plan.encoder.has_value()) {
    add("features", *plan.encoder, stages[0]);
    add("feature-gradient", stages[0], *plan.encoder);
  }
  for (size_t i = 0; i + 1 < stages.size(); ++i) {
    add(absl::StrCat("activation.", i), stages[i], stages[i + 1]);
    add(absl::StrCat("gradient.", i), stages[i + 1], stages[i]);
  }
  if (tied && stages.size() > 1) {
    add("tied-gradient.forward", stages.front(), stages.back());
    add("tied-gradient.back", stages.back(), stages.front());
  }
  return edges;
}

void AddGrant(const PlanInputs& inputs, worker::v1::Plan& plan, worker::v1::Plan& dataloader) {
  worker::v1::DataGrant grant;
  if (plan.part().has_vision()) grant.add_views(data::v1::MICROBATCH_VIEW_PIXELS);
  if (plan.part().has_embedding()) {
    // A recorded batch may start from embeddings.
    grant.add_views(data::v1::MICROBATCH_VIEW_TOKENS);
    if (inputs.spec.data().has_batches()) grant.add_views(data::v1::MICROBATCH_VIEW_EMBEDDINGS);
  }
  if (plan.part().has_head()) grant.add_views(data::v1::MICROBATCH_VIEW_LABELS);
  if (grant.views().empty()) return;
  grant.set_worker(plan.worker());
  grant.set_access_token(Token(inputs, absl::StrCat("data.", plan.worker())));
  plan.set_access_token(grant.access_token());
  *dataloader.add_grants() = std::move(grant);
}

}  // namespace

std::vector<uint32_t> ClusterPlan::ScheduleWorkers() const {
  std::vector<uint32_t> workers;
  if (encoder.has_value()) workers.push_back(*encoder);
  workers.insert(workers.end(), stages.begin(), stages.end());
  return workers;
}

absl::StatusOr<ClusterPlan> BuildPlan(const PlanInputs& inputs) {
  const cluster::v1::PipelineSpec& pipeline = inputs.spec.pipeline();
  const int32_t num_stages = pipeline.has_stages() ? static_cast<int32_t>(pipeline.stages()) : 2;
  ClusterPlan plan;
  plan.generation = inputs.generation;
  ScheduleOptions& options = plan.schedule_options;
  options.name = pipeline.has_schedule() ? pipeline.schedule() : "1f1b";
  options.stages = num_stages;
  options.microbatches = pipeline.has_microbatches() ? static_cast<int32_t>(pipeline.microbatches()) : 4;
  options.has_vision = inputs.model.vision.has_value();
  options.vision_in_first_stage =
      options.has_vision && inputs.spec.vision().placement() == cluster::v1::VisionSpec::PLACEMENT_FIRST_STAGE;
  options.tied_embeddings = inputs.model.text.tie_word_embeddings;
  MOONPIPE_ASSIGN_OR_RETURN(const Schedule schedule, MakeSchedule(options));
  MOONPIPE_RETURN_IF_ERROR(ValidateSchedule(schedule));

  MOONPIPE_ASSIGN_OR_RETURN(plan.parts, PartsOfStages(inputs.model, num_stages,
                                                      {pipeline.layers_per_stage().begin(), pipeline.layers_per_stage().end()},
                                                      options.vision_in_first_stage));

  const bool needs_encoder = options.has_vision && !options.vision_in_first_stage;
  MOONPIPE_ASSIGN_OR_RETURN(const Cast cast, ChooseWorkers(inputs, static_cast<size_t>(num_stages), needs_encoder));
  plan.dataloader = cast.dataloader->worker;
  if (cast.encoder != nullptr) plan.encoder = cast.encoder->worker;
  for (const RegisteredWorker* stage : cast.stages) plan.stages.push_back(stage->worker);

  const auto add_plan = [&](const RegisteredWorker& worker) -> worker::v1::Plan& {
    worker::v1::Plan& one = plan.plans[worker.worker];
    one.set_generation(inputs.generation);
    one.set_run(inputs.run);
    *one.mutable_spec() = inputs.spec;
    one.set_model_config_json(inputs.model.json);
    one.set_worker(worker.worker);
    one.set_role(worker.registration.role());
    *one.mutable_initial_state() = inputs.initial_state;
    one.set_stages(static_cast<uint32_t>(num_stages));
    return one;
  };
  worker::v1::Plan& dataloader = add_plan(*cast.dataloader);
  *dataloader.mutable_cursor() = inputs.cursor;
  const std::string edge_token = Token(inputs, "edges");
  const auto add_part = [&](const RegisteredWorker& worker, uint32_t stage, const PartRange& range) {
    worker::v1::Plan& one = add_plan(worker);
    worker::v1::ModelPart& part = *one.mutable_part();
    part.set_stage(stage);
    part.set_first_layer(static_cast<uint32_t>(range.first_layer));
    part.set_end_layer(static_cast<uint32_t>(range.end_layer));
    part.set_has_embedding(range.has_embedding);
    part.set_has_head(range.has_head);
    part.set_has_vision(range.has_vision);
    one.set_data_address(cast.dataloader->registration.address());
    one.set_edge_token(edge_token);
    AddGrant(inputs, one, dataloader);
  };
  if (cast.encoder != nullptr) {
    PartRange tower;
    tower.has_vision = true;
    add_part(*cast.encoder, 0, tower);
  }
  for (size_t i = 0; i < plan.parts.size(); ++i) add_part(*cast.stages[i], static_cast<uint32_t>(i), plan.parts[i]);

  const uint64_t max_message_bytes = inputs.spec.runtime().has_max_edge_message_bytes()
                                         ? inputs.spec.runtime().max_edge_message_bytes()
                                         : kDefaultMaxMessageBytes;
  for (const worker::v1::EdgePlan& edge : AllEdges(plan, options.tied_embeddings, max_message_bytes)) {
    *plan.plans[edge.sender()].add_edges() = edge;
    *plan.plans[edge.receiver()].add_edges() = edge;
  }
  return plan;
}

}  // namespace moonpipe
