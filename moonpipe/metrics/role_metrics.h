// Every metric that moonpipe exports, by the role that exports it. Make the struct of a role once per run and keep it.
//
// Durations are seconds, sizes bytes, ratios 0 to 1. A ratio over time is exported as its two counters and divided in a
// rule (MFU, bubble). `run` is the run's id, `stage` the stage's number or "vision". Labels never hold a step, a file
// or a request.
#pragma once

#include <array>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "moonpipe/metrics/registry.h"

namespace moonpipe {

// What the decision maker of a run knows: progress, loss, commits, checkpoints.
struct CoordinatorMetrics {
  CoordinatorMetrics(MetricsRegistry* registry, const std::string& run);

  CounterHandle steps;           // Committed steps.
  CounterHandle text_tokens;     // moonpipe_train_tokens_total by kind: real tokens that are no media placeholder,
  CounterHandle image_tokens;    // media placeholders,
  CounterHandle padding_tokens;  // and padding.
  CounterHandle images;
  CounterHandle samples;
  GaugeHandle loss;      // Mean over the trained labels of the last committed step.
  GaugeHandle loss_max;  // Largest mean loss of one of its microbatches.
  GaugeHandle balance_loss;
  GaugeHandle grad_norm;
  GaugeHandle vision_learning_rate;
  GaugeHandle projector_learning_rate;
  GaugeHandle decoder_learning_rate;
  HistogramHandle step_duration;
  GaugeHandle last_step_timestamp;  // Seconds since the epoch.
  GaugeHandle target_steps;
  HistogramHandle checkpoint_write_duration;   // Phase: workers write their shards.
  HistogramHandle checkpoint_commit_duration;  // Phase: index, manifest, rename.
  GaugeHandle checkpoint_last_success_timestamp;
  CounterHandle checkpoint_bytes;

  // `reason` is the StepEvent's: empty, not_finite.
  CounterHandle skipped_steps(const std::string& reason) const;
  // Workers that were lost or came again, by stage and reason: lost, silent, restarted.
  CounterHandle stage_restarts(const std::string& stage, const std::string& reason) const;

 private:
  MetricsRegistry* registry_;
  std::string run_;
};

// What a stage does with its time; the phases of one step add up to its duration.
enum class StagePhase { kForward, kBackward, kWeight, kSend, kReceive, kOptimizer, kBubble, kIdle };
inline constexpr int kStagePhases = 8;
absl::string_view StagePhaseName(StagePhase phase);

enum class MemoryKind { kAllocated, kReserved, kPeak };

// A worker that computes: decoder stage or vision encoder.
struct WorkerMetrics {
  // `role` is decoder-stage or vision-encoder; `device` the device's UUID, or "cpu".
  WorkerMetrics(MetricsRegistry* registry, const std::string& run, const std::string& stage, const std::string& role,
                const std::string& device);

  GaugeHandle device_peak;           // FLOP/s; leave it alone where the peak is not known.
  HistogramHandle dataloader_wait;   // From asking for a view of a microbatch to having it.
  HistogramHandle vision_queue;      // The first stage's wait for the features of a microbatch.
  CounterHandle train_microbatches;  // moonpipe_stage_microbatches_total by mode: forward passes while training,
  CounterHandle eval_microbatches;   // and while answering held-out sets.
  CounterHandle comm_aborts;
  GaugeHandle expert_load_max_ratio;  // Largest load of an expert over the mean, over the layers of the stage.
  CounterHandle dropped_tokens;       // Tokens that no expert took.

  const CounterHandle& phase(StagePhase phase) const { return phases_[static_cast<size_t>(phase)]; }
  void AddPhase(StagePhase phase, absl::Duration duration) const {
    this->phase(phase).Add(absl::ToDoubleSeconds(duration));
  }

  void SetMemory(MemoryKind kind, double bytes);
  // `reason` is a status code's name in lower case: unavailable, deadline_exceeded, data_loss, aborted.
  CounterHandle comm_errors(const std::string& reason) const;
  // Model FLOPs of one part of the model, two series in all: `part` is decoder, or vision for tower and projector. A worker that
  // owns neither's work has no series of it.
  CounterHandle model_flops(const std::string& part) const;
  // Payload of the features' edge.
  CounterHandle vision_feature_bytes(const std::string& transport) const;

 private:
  MetricsRegistry* registry_;
  MetricLabels labels_;  // run, stage
  std::string role_;
  std::string device_;
  std::array<CounterHandle, kStagePhases> phases_;
};

// One end of one edge. Payload is tensor bytes and equals the theoretical count of a step; frames are counted apart.
struct EdgeMetrics {
  // `direction` is send or recv; `transport` nccl, unix, tcp or local.
  EdgeMetrics(MetricsRegistry* registry, const std::string& run, const std::string& stage, const std::string& edge,
              const std::string& direction, const std::string& transport);

  CounterHandle payload_bytes;
  CounterHandle frame_bytes;
};

// The dataloader.
struct DataloaderMetrics {
  DataloaderMetrics(MetricsRegistry* registry, const std::string& run);

  CounterHandle samples_packed;  // moonpipe_dataloader_samples_total by outcome.
  CounterHandle samples_too_long;
  CounterHandle samples_corrupt;
  GaugeHandle prefetched_steps;
  HistogramHandle step_duration;  // Reading, decoding and packing one step.
  CounterHandle denied_fetches;   // Fetches with a token that does not allow the view.

  // `view` is tokens, pixels or labels.
  CounterHandle views(const std::string& view) const;
  CounterHandle view_bytes(const std::string& view) const;

 private:
  MetricsRegistry* registry_;
  std::string run_;
};

// moonpipe_rpc_server_duration_seconds, for ServerOptions::on_rpc. `code` is OK, NOT_FOUND, ...
class RpcServerMetrics {
 public:
  explicit RpcServerMetrics(MetricsRegistry* registry) : registry_(registry) {}
  void Observe(const std::string& service, const std::string& method, const std::string& code,
               absl::Duration duration) const;

 private:
  MetricsRegistry* registry_;
};

}  // namespace moonpipe
