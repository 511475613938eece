// Steps of a tiny model in this process: all workers of a schedule, each with an executor on a thread of its own, over in-process edges.
#pragma once

#include <torch/torch.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "moonpipe/comm/in_process_edge.h"
#include "moonpipe/data/step_source.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/pipeline/decoder_stage.h"
#include "moonpipe/pipeline/schedule.h"
#include "moonpipe/pipeline/stage_executor.h"
#include "moonpipe/pipeline/stage_split.h"
#include "moonpipe/pipeline/vision_stage.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {

inline constexpr uint64_t kGeneration = 3;

inline ModelConfig Config(bool tied = false) {
  auto config = ParseModelConfig((tied ? TinyTiedConfig() : TinyConfig()).dump());
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

// Four microbatches of the digits; the third has no picture.
inline const Step& DigitsStep() {
  static const Step step = [] {
    StepSourceOptions options;
    options.files = {SOURCE_DIR "/examples/digits/train-000000.tar"};
    options.tokenizer_folder = SOURCE_DIR "/examples/digits/tokenizer";
    options.vocab_size = 448;
    options.media_placeholder_token_id = 421;
    options.microbatches = 128;
    options.microbatch_tokens = 64;  // one or two samples
    options.packing_window = 2;
    options.pictures.max_patches = 4096;
    const auto source = OpenStepSource(options);
    EXPECT_TRUE(source.ok()) << source.status();
    absl::StatusOr<Step> made = (*source)->Make(1, {});
    EXPECT_TRUE(made.ok()) << made.status();
    // With pictures, with, without, with: in the order in which they come.
    Step chosen;
    chosen.manifest.set_step(5);
    size_t next = 0;
    for (const bool pictures : {true, true, false, true}) {
      while ((made->manifest.microbatches(static_cast<int>(next)).feature_rows() > 0) != pictures) ++next;
      auto* microbatch = chosen.manifest.add_microbatches();
      *microbatch = made->manifest.microbatches(static_cast<int>(next));
      microbatch->set_index(static_cast<uint32_t>(chosen.microbatches.size()));
      chosen.microbatches.push_back(made->microbatches[next++]);
    }
    return chosen;
  }();
  return step;
}

class StepProvider : public MicrobatchProvider {
 public:
  explicit StepProvider(const Step* step) : step_(step) {}
  absl::StatusOr<std::string> Take(uint32_t microbatch, data::v1::MicrobatchView view, absl::Time) override {
    const Microbatch& from = step_->microbatches.at(microbatch);
    auto bytes = [](const auto& values) {
      return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
    };
    if (view == data::v1::MICROBATCH_VIEW_PIXELS) return bytes(from.patches);
    if (view == data::v1::MICROBATCH_VIEW_EMBEDDINGS) return bytes(from.embeddings);
    return bytes(view == data::v1::MICROBATCH_VIEW_TOKENS ? from.token_ids : from.labels);
  }

 private:
  const Step* const step_;
};

// Hands its messages over as late as an edge may: when they are flushed. What changes a tensor before that changes what is sent.
class LateSendEdge : public SendEdge {
 public:
  explicit LateSendEdge(std::unique_ptr<SendEdge> edge) : edge_(std::move(edge)) {}
  absl::Status Send(const MessageHeader& header, Payload payload, absl::Time) override {
    waiting_.emplace_back(header, std::move(payload));
    return absl::OkStatus();
  }
  absl::Status Flush(absl::Time deadline) override {
    for (auto& [header, payload] : std::exchange(waiting_, {})) {
      if (absl::Status sent = edge_->Send(header, std::move(payload), deadline); !sent.ok()) return sent;
    }
    return edge_->Flush(deadline);
  }
  void Abort(const absl::Status& reason) override { edge_->Abort(reason); }
  EdgeCounters counters() const override { return edge_->counters(); }
  const std::string& name() const override { return edge_->name(); }
  std::string transport() const override { return edge_->transport(); }

 private:
  const std::unique_ptr<SendEdge> edge_;
  std::vector<std::pair<MessageHeader, Payload>> waiting_;
};

// All workers of a schedule in this process.
class Workers {
 public:
  struct Options {
    int32_t stages = 1;
    bool vision_in_first_stage = true;
    bool tied = false;
    uint32_t groups = 1;
    std::string schedule = "1f1b";
    std::map<std::string, EdgeFaults> faults = {};
    std::string late_edge = {};  // this one hands its messages over late
    bool vision_frozen = false;
    DecoderStage::Options decoder = {};
  };

  explicit Workers(const Options& options, const Step& step = DigitsStep()) : provider_(&step) {
    torch::set_num_threads(1);
    at::globalContext().setDeterministicAlgorithms(true, false);
    const ModelConfig config = Config(options.tied);
    ScheduleOptions schedule_options;
    schedule_options.name = options.schedule;
    schedule_options.stages = options.stages;
    schedule_options.microbatches = step.manifest.microbatches_size();
    schedule_options.vision_in_first_stage = options.vision_in_first_stage;
    schedule_options.tied_embeddings = options.tied;
    const auto schedule = MakeSchedule(schedule_options);
    EXPECT_TRUE(schedule.ok()) << schedule.status();
    uint64_t labels = 0;
    for (const auto& microbatch : step.manifest.microbatches()) labels += microbatch.trained_labels();

    const int64_t layers = config.text.num_hidden_layers;
    for (const WorkerActions& actions : schedule->workers) {
      Worker& worker = workers_.emplace_back();
      const int32_t chunk = actions.chunks.back();
      PartRange range;
      range.has_vision = actions.chunks.front() == kVisionChunk;
      if (chunk != kVisionChunk) {
        range.first_layer = layers * chunk / options.stages;
        range.end_layer = layers * (chunk + 1) / options.stages;
        range.has_embedding = chunk == 0;
        range.has_head = chunk + 1 == options.stages;
      }
      worker.store = std::make_unique<ParameterStore>(config, range);
      DrawFreshWeights(11, *worker.store);
      for (const Parameter& parameter : worker.store->parameters()) {
        const bool decoder = parameter.published.front().part == ModelPartKind::kDecoder;
        if (options.vision_frozen && !decoder) torch::Tensor(parameter.value).requires_grad_(false);
      }
      worker.gradients = std::make_unique<GradientAccumulator>(worker.store.get(), options.groups);
      if (range.has_vision) worker.vision = std::make_unique<VisionStage>(worker.store.get(), worker.gradients.get());
      if (chunk != kVisionChunk) worker.decoder = std::make_unique<DecoderStage>(worker.store.get(), worker.gradients.get(), options.decoder);
      worker.run.set_generation(kGeneration);
      worker.run.set_step(step.manifest.step());
      *worker.run.mutable_manifest() = step.manifest;
      worker.run.set_trained_labels(labels);
      for (const Action& action : actions.actions) worker.run.add_actions(action.ToString());
      worker.chunk = chunk;
    }
    const size_t first = options.vision_in_first_stage ? 0 : 1;
    auto join = [&](const std::string& name, size_t sender, size_t receiver) {
      InProcessEdgeOptions edge_options;
      if (const auto fault = options.faults.find(name); fault != options.faults.end()) edge_options.faults = fault->second;
      InProcessEdge edge = MakeInProcessEdge(name, edge_options);
      if (name == options.late_edge) edge.sender = std::make_unique<LateSendEdge>(std::move(edge.sender));
      workers_[sender].edges.senders[name] = std::move(edge.sender);
      workers_[receiver].edges.receivers[name] = std::move(edge.receiver);
    };
    if (!options.vision_in_first_stage) {
      join("features", 0, 1);
      join("feature-gradient", 1, 0);
    }
    for (size_t stage = 0; stage + first + 1 < workers_.size(); ++stage) {
      join(absl::StrCat("activation.", stage), first + stage, first + stage + 1);
      join(absl::StrCat("gradient.", stage), first + stage + 1, first + stage);
    }
    if (options.tied && options.stages > 1) {
      join("tied-gradient.forward", first, workers_.size() - 1);
      join("tied-gradient.back", workers_.size() - 1, first);
    }
    for (Worker& worker : workers_) {
      StageExecutor::Options executor;
      executor.vision = worker.vision.get();
      executor.decoder = worker.decoder.get();
      executor.decoder_chunk = worker.chunk;
      executor.edges = &worker.edges;
      executor.on_action = [this, &worker](const std::string& action, const std::string& edge) {
        if (on_action) on_action(worker.chunk, action, edge);
      };
      worker.executor = std::make_unique<StageExecutor>(std::move(executor));
    }
  }

  // Runs the step on all workers. When one fails the others' waits are ended, as the coordinator would; the first failure is returned.
  absl::Status Run(absl::Duration timeout = absl::Seconds(60)) {
    absl::Mutex mutex;
    absl::Status first;
    std::vector<std::thread> threads;
    for (Worker& worker : workers_) {
      threads.emplace_back([&] {
        torch::set_num_threads(1);
        worker.gradients->Begin();
        StepContext context{&worker.run, &provider_, absl::Now() + timeout};
        absl::StatusOr<worker::v1::StepReport> report = worker.executor->Run(context);
        if (report.ok()) {
          worker.gradients->Finish();
          worker.report = *std::move(report);
          return;
        }
        {
          absl::MutexLock lock(&mutex);
          if (first.ok()) {
            first = report.status();
            failed_ = worker.executor.get();
          }
        }
        Abort(absl::AbortedError("another worker failed"));
      });
    }
    for (std::thread& thread : threads) thread.join();
    return first;
  }

  void Abort(const absl::Status& reason) {
    for (Worker& worker : workers_) worker.edges.Abort(reason);
  }

  // Ends waits without closing a connection under a peer, whose error would then be another.
  void AbortReceivers(const absl::Status& reason) {
    for (Worker& worker : workers_) {
      for (auto& [name, edge] : worker.edges.receivers) edge->Abort(reason);
    }
  }

  // Of the worker that failed first.
  const StageExecutor::Position& position() const { return failed_->position(); }
  const worker::v1::StepReport& report(size_t worker) const { return workers_[worker].report; }
  size_t size() const { return workers_.size(); }
  worker::v1::RunStep& run(size_t worker) { return workers_[worker].run; }
  ParameterStore& store(size_t worker) { return *workers_[worker].store; }

  std::vector<double> Losses() const {
    std::vector<double> losses;
    for (const auto& loss : workers_.back().report.losses()) losses.push_back(loss.loss_sum());
    return losses;
  }

  // The bytes of every gradient; a tensor that two workers hold must have the same on both.
  std::map<std::string, std::string> Gradients() const {
    std::map<std::string, std::string> gradients;
    for (const Worker& worker : workers_) {
      for (const TensorSpec& spec : worker.store->specs()) {
        if (!spec.trainable || !worker.store->PublishedGradient(spec.name).defined()) continue;
        const torch::Tensor gradient = worker.store->PublishedGradient(spec.name).contiguous();
        std::string bytes(static_cast<const char*>(gradient.const_data_ptr()), gradient.nbytes());
        const auto [at, inserted] = gradients.emplace(spec.name, bytes);
        EXPECT_TRUE(inserted || at->second == bytes) << spec.name << " differs between two workers";
      }
    }
    return gradients;
  }

  std::function<void(int32_t chunk, const std::string& action, const std::string& edge)> on_action;

 private:
  struct Worker {
    int32_t chunk = 0;
    std::unique_ptr<ParameterStore> store;
    std::unique_ptr<GradientAccumulator> gradients;
    std::unique_ptr<VisionStage> vision;
    std::unique_ptr<DecoderStage> decoder;
    StageEdges edges;
    worker::v1::RunStep run;
    std::unique_ptr<StageExecutor> executor;
    worker::v1::StepReport report;
  };
  StepProvider provider_;
  std::deque<Worker> workers_;
  StageExecutor* failed_ = nullptr;
};

}  // namespace moonpipe
