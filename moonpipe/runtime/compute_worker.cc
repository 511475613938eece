#include "moonpipe/runtime/compute_worker.h"

#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "moonpipe/base/fault_point.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/base/torch_status.h"
#include "moonpipe/comm/edge_connector.h"
#include "moonpipe/metrics/role_metrics.h"
#include "moonpipe/pipeline/schedule.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/model/hf_weights.h"
#include "moonpipe/pipeline/decoder_stage.h"
#include "moonpipe/pipeline/stage_executor.h"
#include "moonpipe/pipeline/step_observation.h"
#include "moonpipe/pipeline/vision_stage.h"
#include "moonpipe/runtime/channel.h"
#include "moonpipe/runtime/microbatch_client.h"
#include "moonpipe/spec/flops.h"
#include "moonpipe/train/master_weights.h"
#include "moonpipe/train/optimizer.h"

namespace moonpipe {

using worker::v1::CommitStep;
using worker::v1::ConnectRequest;
using worker::v1::ConnectResponse;
using worker::v1::Plan;
using worker::v1::RunStep;
using worker::v1::SaveShards;
using worker::v1::StepReport;

namespace {

// Views of a microbatch are larger than control messages.
constexpr int kMaxViewMessageBytes = 8 << 20;
// The plan's name of the edge from the tower to the first stage.
constexpr char kFeaturesEdge[] = "features";

class ClientProvider : public MicrobatchProvider {
 public:
  ClientProvider(MicrobatchClient* client, HistogramHandle wait) : client_(client), wait_(wait) {}
  absl::StatusOr<std::string> Take(uint32_t microbatch, data::v1::MicrobatchView view, absl::Time deadline) override {
    const absl::Time begin = absl::Now();
    absl::StatusOr<std::string> taken = client_->Take(microbatch, view, deadline);
    wait_.Observe(absl::ToDoubleSeconds(absl::Now() - begin));
    return taken;
  }

 private:
  MicrobatchClient* const client_;
  const HistogramHandle wait_;
};

ComputeOptions ComputeOptionsOf(const cluster::v1::TrainingRunSpec& spec) {
  ComputeOptions compute;
  compute.dtype = spec.train().compute_type() == "bf16" ? torch::kBFloat16 : torch::kFloat;
  compute.norm_rounding = spec.model().norm_rounding() == "after_weight" ? NormRounding::kAfterWeight : NormRounding::kBeforeWeight;
  compute.loop_experts = spec.model().experts() == "loop";
  compute.explicit_attention = spec.model().attention() == "explicit";
  compute.recompute = RecomputeOf(spec.train().recompute());
  return compute;
}

DecoderStage::Options DecoderOptionsOf(const cluster::v1::TrainingRunSpec& spec) {
  DecoderStage::Options options;
  options.expert_bias_rate = spec.train().expert_bias_rate();
  options.expert_bias_rule = spec.train().expert_bias_rule() == "centred" ? BiasRule::kCentred : BiasRule::kSign;
  options.balance_loss_weight = spec.train().balance_loss_weight();
  options.qk_clip_threshold = spec.optimizer().qk_clip_threshold();
  return options;
}

// Everything that lives as long as one plan.
class PlanExecution {
 public:
  PlanExecution(const ComputeWorkerOptions& options, Plan plan) : options_(options), plan_(std::move(plan)) {}

  absl::Status Start();
  absl::StatusOr<StepReport> Run(const RunStep& step);
  absl::Status Commit(const CommitStep& step);
  absl::StatusOr<worker::v1::ShardsSaved> Save(const SaveShards& save);
  // Ends every wait. Safe from any thread.
  void Abort(const absl::Status& reason);

  // Counts a failure of communication.
  void ObserveFailure(const absl::Status& status);

  const Plan& plan() const { return plan_; }
  StageExecutor::Position position() const { return executor_.has_value() ? executor_->position() : StageExecutor::Position(); }
  uint64_t parameters() const;
  uint64_t state_bytes() const;

 private:
  absl::Status BuildModel();
  absl::Status ConnectEdges();
  void ObserveStep(const RunStep& step, const StepReport& report);

  const ComputeWorkerOptions options_;
  const Plan plan_;
  Cancellation cancellation_;
  std::optional<ParameterStore> store_;
  WeightForm form_;  // how checkpoints spell the weights
  std::optional<GradientAccumulator> gradients_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<VisionStage> vision_;
  std::unique_ptr<DecoderStage> decoder_;
  absl::Mutex edges_mutex_;
  StageEdges edges_;
  std::unique_ptr<MicrobatchClient> data_;
  std::optional<StageExecutor> executor_;

  std::optional<WorkerMetrics> metrics_;
  std::map<std::string, EdgeMetrics> edge_metrics_;
  absl::Time step_begin_;
  absl::Time last_end_ = absl::InfinitePast();
  // Of a step that ran and is not yet committed.
  double pending_vision_flops_ = 0, pending_decoder_flops_ = 0;
  FrozenParts frozen_parts_;
};

absl::Status PlanExecution::Start() {
  at::set_num_threads(static_cast<int>(plan_.spec().runtime().compute_threads()));
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  // The fill would cost a pass over every new tensor; nothing here reads what it did not write.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  options_.client->SetActivity("loading weights", "");
  MOONPIPE_RETURN_IF_ERROR(CatchTorch([&] { return BuildModel(); }));
  ChannelOptions channel;
  channel.max_receive_bytes = kMaxViewMessageBytes;
  MicrobatchClient::Options data;
  data.channel = MakeChannel(plan_.data_address(), channel);
  data.generation = plan_.generation();
  data.access_token = plan_.access_token();
  data_ = std::make_unique<MicrobatchClient>(std::move(data));
  MOONPIPE_RETURN_IF_ERROR(ConnectEdges());
  const bool is_stage = plan_.role() == common::v1::WORKER_ROLE_DECODER_STAGE;
  const std::string stage = is_stage ? absl::StrCat(plan_.part().stage()) : "vision";
  metrics_.emplace(options_.metrics, plan_.run(), stage, is_stage ? "decoder-stage" : "vision-encoder", "cpu");
  if (is_stage) metrics_->model_flops("decoder");
  if (store_->range().has_vision) metrics_->model_flops("vision");
  if (options_.peak_flops_per_second > 0) metrics_->device_peak.Set(options_.peak_flops_per_second);
  for (const auto& [name, edge] : edges_.senders) {
    edge_metrics_.emplace(name, EdgeMetrics(options_.metrics, plan_.run(), stage, name, "send", edge->transport()));
  }
  for (const auto& [name, edge] : edges_.receivers) {
    edge_metrics_.emplace(name, EdgeMetrics(options_.metrics, plan_.run(), stage, name, "recv", edge->transport()));
  }
  // At 0 from the start, like every counter.
  for (const auto& [name, edge] : edges_.senders) {
    if (name == kFeaturesEdge) metrics_->vision_feature_bytes(std::string(edge->transport()));
  }
  for (const auto& [name, edge] : edges_.receivers) {
    if (name == kFeaturesEdge) metrics_->vision_feature_bytes(std::string(edge->transport()));
  }
  StageExecutor::Options executor;
  executor.vision = vision_.get();
  executor.decoder = decoder_.get();
  executor.decoder_chunk = static_cast<int32_t>(plan_.part().stage());
  executor.edges = &edges_;
  executor.on_action = [client = options_.client](const std::string& action, const std::string& edge) {
    client->SetActivity(action, edge);
  };
  executor_.emplace(std::move(executor));
  options_.client->SetActivity("idle", "");
  return absl::OkStatus();
}

absl::Status PlanExecution::BuildModel() {
  MOONPIPE_ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(plan_.model_config_json()));
  PartRange range;
  range.first_layer = plan_.part().first_layer();
  range.end_layer = plan_.part().end_layer();
  range.has_embedding = plan_.part().has_embedding();
  range.has_head = plan_.part().has_head();
  range.has_vision = plan_.part().has_vision();
  store_.emplace(config, range);
  store_->set_compute(ComputeOptionsOf(plan_.spec()));
  const worker::v1::InitialState& initial = plan_.initial_state();
  if (initial.path().empty()) {
    DrawFreshWeights(plan_.spec().train().seed(), *store_);
    form_ = FreshForm(*store_);
  } else {
    LoadOptions load;
    load.keep_quantised = plan_.spec().model().keep_quantised();
    MOONPIPE_ASSIGN_OR_RETURN(form_, LoadModelFolder(initial.path(), *store_, load));
  }
  MOONPIPE_ASSIGN_OR_RETURN(std::vector<UpdateRule> rules,
                            AssignUpdateRules(plan_.spec().optimizer(), store_->specs(), ListTensors(config)));
  // A parameter without any moving tensor needs no gradient.
  std::map<std::string, bool> frozen;
  std::vector<bool> moving;
  for (size_t i = 0; i < rules.size(); ++i) {
    frozen[store_->specs()[i].name] = rules[i].frozen;
    moving.push_back(!rules[i].frozen);
  }
  // Of the own tensors alone: enough for the tower's count, since tower and projector are never apart.
  frozen_parts_ = FindFrozenParts(config, store_->specs(), moving);
  for (const Parameter& parameter : store_->parameters()) {
    const bool moves = std::any_of(parameter.published.begin(), parameter.published.end(),
                                   [&](const TensorSpec& spec) { return !frozen.at(spec.name); });
    torch::Tensor value = parameter.value;
    if (parameter.trainable && !moves) value.requires_grad_(false);
  }
  gradients_.emplace(&*store_, plan_.spec().train().gradient_groups());
  optimizer_ = std::make_unique<Optimizer>(&*store_, plan_.spec().optimizer(), std::move(rules));
  if (initial.has_optimizer_state()) {
    std::vector<SafetensorsFile> files;
    uint64_t steps = 0;
    for (const auto& entry : std::filesystem::directory_iterator(initial.path())) {
      const std::string name = entry.path().filename().string();
      if (!absl::StartsWith(name, "optimizer-") || !absl::EndsWith(name, ".safetensors")) continue;
      MOONPIPE_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(entry.path().string()));
      steps = std::stoull(file.metadata().at("optimizer_steps"));
      files.push_back(std::move(file));
    }
    MOONPIPE_RETURN_IF_ERROR(optimizer_->LoadState(files, steps));
    MOONPIPE_RETURN_IF_ERROR(LoadMasterWeights(files, form_, *store_));
  }
  if (range.has_vision) vision_ = std::make_unique<VisionStage>(&*store_, &*gradients_);
  if (plan_.role() == common::v1::WORKER_ROLE_DECODER_STAGE) decoder_ = std::make_unique<DecoderStage>(&*store_, &*gradients_, DecoderOptionsOf(plan_.spec()));
  return absl::OkStatus();
}

absl::Status PlanExecution::ConnectEdges() {
  const absl::Time deadline = absl::Now() + absl::Seconds(plan_.spec().runtime().start_timeout_seconds());
  std::unique_ptr<Rendezvous> rendezvous = options_.client->MakeRendezvous(plan_.generation());
  for (const worker::v1::EdgePlan& edge : plan_.edges()) {
    options_.client->SetActivity("connecting", edge.name());
    EdgeEndpoint endpoint;
    endpoint.name = edge.name();
    endpoint.run = plan_.run();
    endpoint.generation = plan_.generation();
    endpoint.self_worker = plan_.worker();
    endpoint.peer_worker = edge.sender() == plan_.worker() ? edge.receiver() : edge.sender();
    endpoint.token = plan_.edge_token();
    endpoint.max_message_bytes = edge.max_message_bytes();
    endpoint.boot_id = options_.boot_id;
    endpoint.socket_folder = options_.socket_folder;
    endpoint.listen_host = options_.listen_host;
    endpoint.advertise_host = options_.advertise_host;
    endpoint.cancellation = &cancellation_;
    if (edge.sender() == plan_.worker()) {
      MOONPIPE_ASSIGN_OR_RETURN(std::unique_ptr<SendEdge> sender, ConnectSendEdge(endpoint, rendezvous.get(), deadline));
      absl::MutexLock lock(&edges_mutex_);
      edges_.senders[edge.name()] = std::move(sender);
    } else {
      MOONPIPE_ASSIGN_OR_RETURN(std::unique_ptr<ReceiveEdge> receiver, ConnectReceiveEdge(endpoint, rendezvous.get(), deadline));
      absl::MutexLock lock(&edges_mutex_);
      edges_.receivers[edge.name()] = std::move(receiver);
    }
  }
  return absl::OkStatus();
}

void PlanExecution::Abort(const absl::Status& reason) {
  cancellation_.Cancel(reason);
  absl::MutexLock lock(&edges_mutex_);
  edges_.Abort(reason);
  if (data_ != nullptr) data_->Abort(reason);
}

absl::StatusOr<StepReport> PlanExecution::Run(const RunStep& step) {
  if (step.generation() != plan_.generation()) {
    return absl::AbortedError(absl::StrCat("stale generation ", step.generation(), ": this worker's plan has generation ",
                                           plan_.generation()));
  }
  step_begin_ = absl::Now();
  StepContext context;
  context.run = &step;
  ClientProvider provider(data_.get(), metrics_->dataloader_wait);
  context.provider = &provider;
  context.deadline = absl::Now() + absl::Seconds(plan_.spec().runtime().step_timeout_seconds());
  StepObservation observation;
  if (!step.observe_folder().empty()) context.observation = &observation;
  std::vector<MicrobatchClient::Wanted> wanted;
  for (const auto& microbatch : step.manifest().microbatches()) {
    if (vision_ != nullptr && microbatch.feature_rows() > 0) {
      for (const auto view : vision_->views()) wanted.push_back({microbatch.index(), view});
    }
    if (decoder_ == nullptr) continue;
    for (data::v1::MicrobatchView view : decoder_->views()) {
      if (view == data::v1::MICROBATCH_VIEW_TOKENS && microbatch.has_embeddings()) view = data::v1::MICROBATCH_VIEW_EMBEDDINGS;
      if (!step.decode() || view != data::v1::MICROBATCH_VIEW_LABELS) wanted.push_back({microbatch.index(), view});
    }
  }
  data_->Prefetch(step.step(), std::move(wanted), context.deadline);
  if (!step.decode()) {
    MOONPIPE_RETURN_IF_ERROR(CatchTorch([&]() -> absl::Status {
      gradients_->Begin();
      return absl::OkStatus();
    }));
  }
  MOONPIPE_ASSIGN_OR_RETURN(StepReport report, executor_->Run(context));
  if (!step.decode()) {
    MOONPIPE_RETURN_IF_ERROR(CatchTorch([&]() -> absl::Status {
      gradients_->Finish();
      AddGradientNorms(*store_, optimizer_->rules(), report);
      return absl::OkStatus();
    }));
  }
  if (context.observation != nullptr) {
    MOONPIPE_RETURN_IF_ERROR(observation.Write(absl::StrCat(step.observe_folder(), "/worker-", plan_.worker(), ".safetensors"), *store_));
  }
  ObserveStep(step, report);
  return report;
}

void PlanExecution::ObserveStep(const RunStep& step, const StepReport& report) {
  const absl::Time now = absl::Now();
  absl::Duration timed;
  for (const worker::v1::ActionTiming& timing : report.timings()) {
    const absl::Duration duration = absl::Microseconds(timing.end_us() - timing.begin_us());
    const absl::StatusOr<Action> action = ParseAction(timing.action());
    if (!action.ok()) continue;
    StagePhase phase = StagePhase::kSend;
    switch (action->type) {
      case ActionType::kForward:
        phase = StagePhase::kForward;
        (step.decode() ? metrics_->eval_microbatches : metrics_->train_microbatches).Add();
        break;
      case ActionType::kBackward:
        phase = StagePhase::kBackward;
        break;
      case ActionType::kReceiveActivation:
      case ActionType::kReceiveGradient:
      case ActionType::kReceiveFeatures:
      case ActionType::kReceiveFeatureGradient:
        phase = timing.waited() ? StagePhase::kBubble : StagePhase::kReceive;
        // The first stage's wait for the tower; 0 where the features were there already.
        if (action->type == ActionType::kReceiveFeatures) {
          metrics_->vision_queue.Observe(timing.waited() ? absl::ToDoubleSeconds(duration) : 0);
        }
        break;
      default:
        break;
    }
    metrics_->AddPhase(phase, duration);
    timed += duration;
  }
  // Between actions: fetching pixels is inside them, so little is left.
  metrics_->AddPhase(StagePhase::kBubble, std::max(absl::ZeroDuration(), now - step_begin_ - timed));
  if (last_end_ != absl::InfinitePast()) metrics_->AddPhase(StagePhase::kIdle, step_begin_ - last_end_);
  last_end_ = now;
  metrics_->SetMemory(MemoryKind::kPeak, static_cast<double>(report.peak_memory_bytes()));
  for (const worker::v1::EdgeBytes& edge : report.edges()) {
    const EdgeMetrics& metrics = edge_metrics_.at(edge.edge());
    metrics.payload_bytes.Add(static_cast<double>(edge.payload_bytes()));
    metrics.frame_bytes.Add(static_cast<double>(edge.frame_bytes()));
    if (edge.edge() == kFeaturesEdge) {
      metrics_->vision_feature_bytes(edge.transport()).Add(static_cast<double>(edge.payload_bytes()));
    }
  }
  double ratio = 0;
  for (const auto& counts : report.expert_counts()) {
    double sum = 0, largest = 0;
    for (const uint64_t count : counts.counts()) {
      sum += static_cast<double>(count);
      largest = std::max(largest, static_cast<double>(count));
    }
    if (sum > 0) ratio = std::max(ratio, largest * counts.counts_size() / sum);
  }
  if (ratio > 0) metrics_->expert_load_max_ratio.Set(ratio);
  pending_vision_flops_ = pending_decoder_flops_ = 0;
  if (step.decode()) return;
  if (store_->range().has_vision) {
    PartRange tower;
    tower.has_vision = true;
    pending_vision_flops_ = static_cast<double>(CountTrainingFlops(store_->config(), tower, step.manifest(), frozen_parts_).total());
  }
  pending_decoder_flops_ = step.model_flops() - pending_vision_flops_;
}

void PlanExecution::ObserveFailure(const absl::Status& status) {
  if (!metrics_.has_value() || position().edge.empty()) return;
  if (absl::IsAborted(status) || absl::IsCancelled(status)) {
    metrics_->comm_aborts.Add();
  } else {
    metrics_->comm_errors(absl::AsciiStrToLower(absl::StatusCodeToString(status.code()))).Add();
  }
}

absl::Status PlanExecution::Commit(const CommitStep& step) {
  MOONPIPE_RETURN_IF_ERROR(FaultPoint("commit", step.step()));
  return CatchTorch([&]() -> absl::Status {
    const absl::Time begin = absl::Now();
    const bool vision_moves = plan_.spec().train().step_idle_parts() || vision_ == nullptr || vision_->had_work();
    optimizer_->Step(step.clip_factor(), step.learning_rate_factor(), vision_moves, /*move_decoder=*/true);
    if (decoder_ != nullptr) decoder_->AfterStep(step);
    const absl::Time end = absl::Now();
    metrics_->AddPhase(StagePhase::kOptimizer, end - begin);
    if (store_->range().has_vision) metrics_->model_flops("vision").Add(pending_vision_flops_);
    if (decoder_ != nullptr) metrics_->model_flops("decoder").Add(pending_decoder_flops_);
    last_end_ += end - begin;
    return absl::OkStatus();
  });
}

absl::StatusOr<worker::v1::ShardsSaved> PlanExecution::Save(const SaveShards& save) {
  MOONPIPE_RETURN_IF_ERROR(FaultPoint("save", save.step()));
  return CatchTorch([&]() -> absl::StatusOr<worker::v1::ShardsSaved> {
    worker::v1::ShardsSaved saved;
    saved.set_generation(save.generation());
    saved.set_step(save.step());
    const std::map<std::string, std::string> metadata = {{"optimizer_steps", absl::StrCat(optimizer_->steps())}};
    const auto path_of = [&](const std::string& kind) {
      return absl::StrFormat("%s/%s-%05d-of-%05d.safetensors", save.folder(), kind, save.shard(), save.shards());
    };
    const auto add = [&](const std::string& path, uint64_t file_bytes, uint64_t tensor_bytes) -> absl::StatusOr<worker::v1::ShardFile*> {
      worker::v1::ShardFile* file = saved.add_files();
      file->set_name(std::filesystem::path(path).filename().string());
      file->set_size_bytes(file_bytes);
      file->set_tensor_bytes(tensor_bytes);
      MOONPIPE_ASSIGN_OR_RETURN(*file->mutable_sha256(), Sha256HexOfFile(path));
      return file;
    };
    const std::string model_path = path_of("model");
    MOONPIPE_ASSIGN_OR_RETURN(const WrittenWeights weights, WriteWeights(model_path, *store_, form_, metadata));
    MOONPIPE_ASSIGN_OR_RETURN(worker::v1::ShardFile* model, add(model_path, weights.file_bytes, weights.tensor_bytes));
    // Only weights are named: they make up the index, which must list nothing else.
    model->mutable_tensors()->Add(weights.names.begin(), weights.names.end());

    // The first stage writes the state of a tied embedding.
    const bool has_copy = store_->tied_head().defined() && !store_->range().has_embedding;
    const std::string copy = store_->decoder_prefix() + "embed_tokens.weight";
    std::vector<StoredTensor> state;
    for (std::vector<StoredTensor> some : {optimizer_->State(), MasterWeights(*store_, form_, optimizer_->rules())}) {
      for (StoredTensor& tensor : some) {
        if (!has_copy || !absl::EndsWith(tensor.name, copy)) state.push_back(std::move(tensor));
      }
    }
    uint64_t state_bytes = 0;
    for (const StoredTensor& tensor : state) state_bytes += tensor.num_bytes();
    const std::string state_path = path_of("optimizer");
    MOONPIPE_ASSIGN_OR_RETURN(const uint64_t file_bytes, WriteSafetensors(state_path, state, metadata));
    MOONPIPE_RETURN_IF_ERROR(add(state_path, file_bytes, state_bytes).status());
    return saved;
  });
}

uint64_t PlanExecution::parameters() const {
  uint64_t count = 0;
  for (const TensorSpec& spec : store_->specs()) count += static_cast<uint64_t>(spec.num_elements());
  return count;
}

uint64_t PlanExecution::state_bytes() const {
  uint64_t bytes = optimizer_->state_bytes();
  for (const Parameter& parameter : store_->parameters()) {
    bytes += parameter.value.nbytes();
    if (parameter.value.grad().defined()) bytes += parameter.value.grad().nbytes() * plan_.spec().train().gradient_groups();
  }
  return bytes;
}

ConnectRequest FailureEvent(const absl::Status& status, uint64_t generation, const StageExecutor::Position& position) {
  ConnectRequest event;
  worker::v1::WorkerFailure& failure = *event.mutable_failure();
  failure.set_generation(generation);
  failure.set_code(static_cast<int32_t>(status.code()));
  failure.set_message(std::string(status.message()));
  failure.set_edge(position.edge);
  failure.set_microbatch(position.microbatch);
  failure.set_action(position.action);
  return event;
}

}  // namespace

absl::Status ServeComputeWorker(const ComputeWorkerOptions& options) {
  CoordinatorClient& client = *options.client;
  // Shared with the interrupt, which may still run while a drained worker leaves.
  std::shared_ptr<PlanExecution> execution;
  auto fail = [&](const absl::Status& status) {
    if (execution != nullptr) execution->ObserveFailure(status);
    client.Send(FailureEvent(status, execution == nullptr ? 0 : execution->plan().generation(),
                             execution == nullptr ? StageExecutor::Position() : execution->position()));
    return status;
  };
  while (true) {
    // Idle time has no limit: the client itself notices a coordinator that is gone or silent.
    MOONPIPE_ASSIGN_OR_RETURN(const ConnectResponse command, client.Next(absl::InfiniteFuture()));
    ConnectRequest event;
    switch (command.command_case()) {
      case ConnectResponse::kPlan: {
        execution = std::make_shared<PlanExecution>(options, command.plan());
        client.OnInterrupt([execution](const absl::Status& reason) { execution->Abort(reason); });
        if (absl::Status started = execution->Start(); !started.ok()) return fail(started);
        event.mutable_plan_ready()->set_generation(command.plan().generation());
        event.mutable_plan_ready()->set_parameters(execution->parameters());
        event.mutable_plan_ready()->set_state_bytes(execution->state_bytes());
        break;
      }
      case ConnectResponse::kRunStep: {
        absl::StatusOr<StepReport> report = execution->Run(command.run_step());
        if (!report.ok()) return fail(report.status());
        *event.mutable_step_report() = *std::move(report);
        break;
      }
      case ConnectResponse::kCommitStep: {
        if (absl::Status committed = execution->Commit(command.commit_step()); !committed.ok()) return fail(committed);
        event.mutable_step_committed()->set_generation(command.commit_step().generation());
        event.mutable_step_committed()->set_step(command.commit_step().step());
        break;
      }
      case ConnectResponse::kSkipStep:
        event.mutable_step_committed()->set_generation(command.skip_step().generation());
        event.mutable_step_committed()->set_step(command.skip_step().step());
        break;
      case ConnectResponse::kSaveShards: {
        client.SetActivity("saving", "");
        absl::StatusOr<worker::v1::ShardsSaved> saved = execution->Save(command.save_shards());
        client.SetActivity("idle", "");
        if (!saved.ok()) {
          // A full disk is no reason to end here: the coordinator decides.
          const std::string error(saved.status().message());
          saved = worker::v1::ShardsSaved();
          saved->set_generation(command.save_shards().generation());
          saved->set_step(command.save_shards().step());
          saved->set_error(error);
        }
        *event.mutable_shards_saved() = *std::move(saved);
        break;
      }
      case ConnectResponse::kDrain:
        MP_LOG(INFO) << "drained: " << command.drain().reason();
        return absl::OkStatus();
      default:
        return fail(absl::InternalError(absl::StrCat("a command that this worker does not know: ", command.command_case())));
    }
    client.Send(std::move(event));
  }
}

double MeasurePeakFlops(int threads) {
  at::set_num_threads(threads);
  torch::NoGradGuard no_grad;
  constexpr int64_t kSize = 512;
  const torch::Tensor a = torch::ones({kSize, kSize}), b = torch::ones({kSize, kSize});
  torch::Tensor c = torch::empty({kSize, kSize});
  double best = 0;
  const absl::Time end = absl::Now() + absl::Milliseconds(200);
  while (absl::Now() < end) {
    const absl::Time begin = absl::Now();
    at::mm_out(c, a, b);
    best = std::max(best, 2.0 * kSize * kSize * kSize / absl::ToDoubleSeconds(absl::Now() - begin));
  }
  return best;
}

}  // namespace moonpipe
