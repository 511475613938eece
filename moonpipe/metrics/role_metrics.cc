#include "moonpipe/metrics/role_metrics.h"

namespace moonpipe {
namespace {

const std::vector<double>& StepBuckets() {
  static const auto* bounds = new std::vector<double>{0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600};
  return *bounds;
}

const std::vector<double>& WaitBuckets() {
  static const auto* bounds =
      new std::vector<double>{0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10};
  return *bounds;
}

const std::vector<double>& CheckpointBuckets() {
  static const auto* bounds = new std::vector<double>{0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800};
  return *bounds;
}

MetricLabels With(MetricLabels labels, const std::string& name, const std::string& value) {
  labels[name] = value;
  return labels;
}

absl::string_view MemoryKindName(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kAllocated:
      return "allocated";
    case MemoryKind::kReserved:
      return "reserved";
    case MemoryKind::kPeak:
      return "peak";
  }
  return "";
}

}  // namespace

CoordinatorMetrics::CoordinatorMetrics(MetricsRegistry* registry, const std::string& run)
    : registry_(registry), run_(run) {
  const MetricLabels labels = {{"run", run}};
  steps = registry->Counter("moonpipe_train_steps_total", "Committed optimizer steps.", labels);
  const auto tokens = [&](const char* kind) {
    return registry->Counter("moonpipe_train_tokens_total", "Tokens of committed steps.", With(labels, "kind", kind));
  };
  text_tokens = tokens("text");
  image_tokens = tokens("image");
  padding_tokens = tokens("padding");
  images = registry->Counter("moonpipe_train_images_total", "Pictures of committed steps.", labels);
  samples = registry->Counter("moonpipe_train_samples_total", "Samples of committed steps.", labels);
  loss = registry->Gauge("moonpipe_train_loss", "Mean cross entropy over the trained labels of the last step.", labels);
  loss_max = registry->Gauge("moonpipe_train_loss_max", "Largest mean cross entropy of a microbatch of the last step.",
                             labels);
  balance_loss = registry->Gauge("moonpipe_train_balance_loss",
                                 "Weighted auxiliary loss of the experts' balance in the last step; 0 without.", labels);
  grad_norm = registry->Gauge("moonpipe_train_grad_norm", "Gradient norm over all services before clipping.", labels);
  const auto learning_rate = [&](const char* group) {
    return registry->Gauge("moonpipe_train_learning_rate", "Learning rate of the last step.",
                           With(labels, "group", group));
  };
  vision_learning_rate = learning_rate("vision");
  projector_learning_rate = learning_rate("projector");
  decoder_learning_rate = learning_rate("decoder");
  step_duration = registry->Histogram("moonpipe_train_step_duration_seconds", "From the start of a step to its commit.",
                                      labels, StepBuckets());
  last_step_timestamp =
      registry->Gauge("moonpipe_train_last_step_timestamp_seconds", "When the last step was committed.", labels);
  target_steps = registry->Gauge("moonpipe_train_target_steps", "Steps of the whole run.", labels);
  const auto checkpoint = [&](const char* phase) {
    return registry->Histogram("moonpipe_checkpoint_duration_seconds", "Time of writing a checkpoint, by phase.",
                               With(labels, "phase", phase), CheckpointBuckets());
  };
  checkpoint_write_duration = checkpoint("write");
  checkpoint_commit_duration = checkpoint("commit");
  checkpoint_last_success_timestamp = registry->Gauge("moonpipe_checkpoint_last_success_timestamp_seconds",
                                                      "When the last checkpoint became ready.", labels);
  checkpoint_bytes = registry->Counter("moonpipe_checkpoint_bytes_total", "Bytes of finished checkpoints.", labels);
  // The usual reasons show as 0 from the start, so that rate() sees their first rise.
  for (const char* reason : {"empty", "not_finite"}) skipped_steps(reason);
}

CounterHandle CoordinatorMetrics::skipped_steps(const std::string& reason) const {
  return registry_->Counter("moonpipe_train_skipped_steps_total", "Steps that changed no parameter, by reason.",
                            {{"run", run_}, {"reason", reason}});
}

CounterHandle CoordinatorMetrics::stage_restarts(const std::string& stage, const std::string& reason) const {
  return registry_->Counter("moonpipe_stage_restarts_total", "Workers that were lost or came again, by reason.",
                            {{"run", run_}, {"stage", stage}, {"reason", reason}});
}

absl::string_view StagePhaseName(StagePhase phase) {
  static constexpr absl::string_view kNames[kStagePhases] = {"forward", "backward",  "weight", "send",
                                                             "recv",    "optimizer", "bubble", "idle"};
  return kNames[static_cast<size_t>(phase)];
}

WorkerMetrics::WorkerMetrics(MetricsRegistry* registry, const std::string& run, const std::string& stage,
                             const std::string& role, const std::string& device)
    : registry_(registry), labels_({{"run", run}, {"stage", stage}}), role_(role), device_(device) {
  device_peak = registry->Gauge("moonpipe_train_device_peak_flops_per_second",
                                "Peak of the device that a stage runs on.", With(labels_, "role", role));
  const MetricLabels run_label = {{"run", run}};
  dataloader_wait = registry->Histogram("moonpipe_dataloader_wait_seconds",
                                        "Wait of a worker for its view of a microbatch.", run_label, WaitBuckets());
  vision_queue = registry->Histogram("moonpipe_vision_queue_seconds", "Wait of the first stage for the features of a microbatch.",
                                     run_label, WaitBuckets());
  const auto microbatches = [&](const char* mode) {
    return registry->Counter("moonpipe_stage_microbatches_total", "Forward passes of a stage, by mode.",
                             With(labels_, "mode", mode));
  };
  train_microbatches = microbatches("train");
  eval_microbatches = microbatches("eval");
  comm_aborts = registry->Counter("moonpipe_comm_aborts_total", "Edges and groups that were aborted.", labels_);
  expert_load_max_ratio =
      registry->Gauge("moonpipe_moe_expert_load_max_ratio", "Largest load of an expert over the mean load.", labels_);
  dropped_tokens = registry->Counter("moonpipe_moe_dropped_tokens_total", "Tokens that no expert took.", labels_);
  // The usual reasons show as 0 from the start, so that increase() sees their first rise.
  for (const char* reason : {"unavailable", "deadline_exceeded", "data_loss"}) comm_errors(reason);
  for (int i = 0; i < kStagePhases; ++i) {
    phases_[static_cast<size_t>(i)] =
        registry->Counter("moonpipe_stage_phase_seconds_total", "Time of a stage by phase.",
                          With(labels_, "phase", std::string(StagePhaseName(static_cast<StagePhase>(i)))));
  }
}

void WorkerMetrics::SetMemory(MemoryKind kind, double bytes) {
  registry_
      ->Gauge("moonpipe_device_memory_bytes", "Memory of the device that a stage uses.",
              With(With(labels_, "device_uuid", device_), "kind", std::string(MemoryKindName(kind))))
      .Set(bytes);
}

CounterHandle WorkerMetrics::comm_errors(const std::string& reason) const {
  return registry_->Counter("moonpipe_comm_errors_total", "Errors of edges and groups, by reason.",
                            With(labels_, "reason", reason));
}

CounterHandle WorkerMetrics::model_flops(const std::string& part) const {
  return registry_->Counter("moonpipe_train_model_flops_total", "Model FLOPs counted from the manifest; recomputation never counts.",
                            With(With(labels_, "role", role_), "part", part));
}

CounterHandle WorkerMetrics::vision_feature_bytes(const std::string& transport) const {
  return registry_->Counter("moonpipe_vision_feature_bytes_total", "Bytes of projected features that were sent or received.",
                            With(labels_, "transport", transport));
}

EdgeMetrics::EdgeMetrics(MetricsRegistry* registry, const std::string& run, const std::string& stage,
                         const std::string& edge, const std::string& direction, const std::string& transport) {
  const MetricLabels labels = {
      {"run", run}, {"stage", stage}, {"edge", edge}, {"direction", direction}, {"transport", transport}};
  payload_bytes = registry->Counter("moonpipe_stage_activation_bytes_total",
                                    "Tensor bytes over an edge, frames not counted.", labels);
  frame_bytes = registry->Counter("moonpipe_edge_frame_bytes_total",
                                  "Bytes of frames over an edge, tensors not counted.", labels);
}

DataloaderMetrics::DataloaderMetrics(MetricsRegistry* registry, const std::string& run)
    : registry_(registry), run_(run) {
  const MetricLabels labels = {{"run", run}};
  const auto outcome = [&](const char* value) {
    return registry->Counter("moonpipe_dataloader_samples_total", "Samples that were read, by outcome.",
                             With(labels, "outcome", value));
  };
  samples_packed = outcome("packed");
  samples_too_long = outcome("too_long");
  samples_corrupt = outcome("corrupt");
  prefetched_steps =
      registry->Gauge("moonpipe_dataloader_prefetched_steps", "Steps that are packed and not yet asked for.", labels);
  step_duration = registry->Histogram("moonpipe_dataloader_step_duration_seconds",
                                      "Reading, decoding and packing one step.", labels, WaitBuckets());
  denied_fetches = registry->Counter("moonpipe_dataloader_denied_fetches_total",
                                     "Fetches whose token does not allow the view.", labels);
  for (const char* view : {"tokens", "pixels", "labels"}) {
    views(view);
    view_bytes(view);
  }
}

CounterHandle DataloaderMetrics::views(const std::string& view) const {
  return registry_->Counter("moonpipe_dataloader_views_total", "Views of microbatches that were served.",
                            {{"run", run_}, {"view", view}});
}

CounterHandle DataloaderMetrics::view_bytes(const std::string& view) const {
  return registry_->Counter("moonpipe_dataloader_view_bytes_total", "Bytes of views that were served.",
                            {{"run", run_}, {"view", view}});
}

void RpcServerMetrics::Observe(const std::string& service, const std::string& method, const std::string& code,
                               absl::Duration duration) const {
  registry_
      ->Histogram("moonpipe_rpc_server_duration_seconds", "Duration of finished calls.",
                  {{"service", service}, {"method", method}, {"code", code}}, WaitBuckets())
      .Observe(absl::ToDoubleSeconds(duration));
}

}  // namespace moonpipe
