// The estimate of memory against a whole training step: forward, backward, norms and AdamW of every part in one process, with every
// tensor that LibTorch allocates counted from before the weights to the end of the step.
#include <torch/torch.h>

#include <array>
#include <fstream>
#include <map>
#include <memory>
#include <random>

#include "gtest/gtest.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/pipeline/decoder_stage.h"
#include "moonpipe/pipeline/schedule.h"
#include "moonpipe/pipeline/stage_executor.h"
#include "moonpipe/pipeline/vision_stage.h"
#include "moonpipe/spec/memory.h"
#include "moonpipe/train/optimizer.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

// Live bytes of tensors on this thread, and the most there have been.
class LiveBytes : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    live_ += bytes;
    most_ = std::max(most_, live_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t live() const { return live_; }
  int64_t most() const { return most_; }

 private:
  int64_t live_ = 0;
  int64_t most_ = 0;
};

// Random tokens, labels and pixels of the shapes in the manifest; media positions first.
class RandomProvider : public MicrobatchProvider {
 public:
  RandomProvider(const ModelConfig& config, const data::v1::StepManifest& manifest) : config_(config), manifest_(manifest) {}
  absl::StatusOr<std::string> Take(uint32_t microbatch, data::v1::MicrobatchView view, absl::Time) override {
    const auto& shape = manifest_.microbatches(static_cast<int>(microbatch));
    if (view == data::v1::MICROBATCH_VIEW_PIXELS) {
      int64_t patches = 0;
      for (const auto& grid : shape.grids()) patches += int64_t{grid.frames()} * grid.rows() * grid.columns();
      std::string pixels(static_cast<size_t>(patches * config_.vision->patch_values()), '\0');
      for (char& pixel : pixels) pixel = static_cast<char>(random_());
      return pixels;
    }
    std::vector<int32_t> ids(shape.tokens());
    for (int32_t& id : ids) id = static_cast<int32_t>(10 + random_() % 100);  // no placeholder among them
    if (view == data::v1::MICROBATCH_VIEW_TOKENS) {
      std::fill(ids.begin(), ids.begin() + shape.feature_rows(), static_cast<int32_t>(config_.media_placeholder_token_id));
    }
    return std::string(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t));
  }

 private:
  const ModelConfig config_;
  const data::v1::StepManifest manifest_;
  std::minstd_rand random_{7};
};

struct Shape {
  std::vector<uint32_t> documents;
  std::vector<std::array<uint32_t, 3>> grids = {};  // frames, rows, columns
  int microbatches = 2;
};

data::v1::StepManifest ManifestOf(const Shape& shape) {
  data::v1::StepManifest manifest;
  manifest.set_step(1);
  for (int m = 0; m < shape.microbatches; ++m) {
    auto* microbatch = manifest.add_microbatches();
    microbatch->set_index(static_cast<uint32_t>(m));
    uint32_t tokens = 0;
    for (const uint32_t length : shape.documents) {
      microbatch->add_document_lengths(length);
      tokens += length;
    }
    microbatch->set_tokens(tokens);
    // The first label of a document has nothing before it.
    microbatch->set_trained_labels(tokens - static_cast<uint32_t>(shape.documents.size()));
    uint32_t rows = 0;
    for (const auto& [frames, height, width] : shape.grids) {
      auto* grid = microbatch->add_grids();
      grid->set_frames(frames);
      grid->set_rows(height);
      grid->set_columns(width);
      rows += height * width / 4;
    }
    microbatch->set_feature_rows(rows);
  }
  return manifest;
}

// The configuration of a fixture with other sizes: {"text_config.hidden_size": 128}.
ModelConfig Model(const std::string& fixture, const std::map<std::string, int64_t>& sizes) {
  std::ifstream file(std::string(TEST_DATA_DIR "/fixtures/") + fixture + "/config.json");
  nlohmann::json json = nlohmann::json::parse(file);
  for (const auto& [path, value] : sizes) {
    const size_t dot = path.find('.');
    (dot == std::string::npos ? json[path] : json[path.substr(0, dot)][path.substr(dot + 1)]) = value;
  }
  auto config = ParseModelConfig(json.dump());
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

int64_t MeasureMostLiveBytes(const ModelConfig& config, const Shape& shape, Recompute recompute) {
  torch::set_num_threads(1);
  const data::v1::StepManifest manifest = ManifestOf(shape);
  const auto counter = std::make_shared<LiveBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);

  PartRange whole{0, config.text.num_hidden_layers, true, true, config.vision.has_value()};
  ParameterStore store(config, whole);
  ComputeOptions compute;
  compute.recompute = recompute;
  store.set_compute(compute);
  DrawFreshWeights(11, store);
  GradientAccumulator gradients(&store, 1);
  cluster::v1::OptimizerSpec spec;
  spec.set_learning_rate(1e-3);
  spec.set_beta1(0.9);
  spec.set_beta2(0.95);
  spec.set_epsilon(1e-8);
  spec.set_weight_decay(0.1);
  auto rules = AssignUpdateRules(spec, store.specs(), ListTensors(config));
  EXPECT_TRUE(rules.ok()) << rules.status();
  Optimizer optimizer(&store, spec, *rules);
  std::unique_ptr<VisionStage> vision;
  if (whole.has_vision) vision = std::make_unique<VisionStage>(&store, &gradients);
  DecoderStage decoder(&store, &gradients);

  ScheduleOptions options;
  options.microbatches = shape.microbatches;
  options.has_vision = whole.has_vision;
  options.vision_in_first_stage = true;
  options.tied_embeddings = config.text.tie_word_embeddings;
  const auto schedule = MakeSchedule(options);
  EXPECT_TRUE(schedule.ok()) << schedule.status();
  worker::v1::RunStep run;
  run.set_generation(1);
  run.set_step(1);
  *run.mutable_manifest() = manifest;
  for (const auto& microbatch : manifest.microbatches()) run.set_trained_labels(run.trained_labels() + microbatch.trained_labels());
  for (const Action& action : schedule->workers[0].actions) run.add_actions(action.ToString());
  StageEdges edges;
  StageExecutor::Options executor_options;
  executor_options.vision = vision.get();
  executor_options.decoder = &decoder;
  executor_options.edges = &edges;
  StageExecutor executor(std::move(executor_options));
  RandomProvider provider(config, manifest);
  gradients.Begin();
  auto report = executor.Run({&run, &provider, absl::Now() + absl::Seconds(100)});
  EXPECT_TRUE(report.ok()) << report.status();
  if (!report.ok()) return 0;
  AddGradientNorms(store, *rules, *report);
  optimizer.Step(0.5, 1.0, true, true);
  return counter->most();
}

void ExpectWithinTenPercent(const ModelConfig& config, const Shape& shape, Recompute recompute = Recompute::kNone) {
  const data::v1::StepManifest manifest = ManifestOf(shape);
  const PartRange whole{0, config.text.num_hidden_layers, true, true, config.vision.has_value()};
  int64_t patches = 0;
  for (const auto& grid : manifest.microbatches(0).grids()) patches += int64_t{grid.frames()} * grid.rows() * grid.columns();
  const MemoryEstimate estimate =
      EstimateMemory(config, whole, {.microbatch_tokens = manifest.microbatches(0).tokens(), .patches = patches, .recompute = recompute});
  const int64_t measured = MeasureMostLiveBytes(config, shape, recompute);
  const double ratio = static_cast<double>(estimate.total_bytes()) / static_cast<double>(measured);
  std::printf("state %.1f MB, activations %.1f MB, working %.1f MB: estimated %.1f MB, measured %.1f MB, ratio %.3f\n",
              1e-6 * static_cast<double>(estimate.state_bytes()), 1e-6 * static_cast<double>(estimate.activations_bytes),
              1e-6 * static_cast<double>(estimate.working_bytes), 1e-6 * static_cast<double>(estimate.total_bytes()),
              1e-6 * static_cast<double>(measured), ratio);
  // State alone is exact, so a model whose state is nearly all would prove nothing.
  if (recompute == Recompute::kNone) {
    EXPECT_GT(2 * (estimate.activations_bytes + estimate.working_bytes), estimate.total_bytes());
  }
  EXPECT_GT(ratio, 0.9);
  EXPECT_LT(ratio, 1.1);
}

TEST(LiveMemoryTest, ATextModelOfManyExpertsIsWithinTenPercent) {
  ExpectWithinTenPercent(Model("moonlight", {{"num_hidden_layers", 6}, {"hidden_size", 128}}), {.documents = {256, 256}});
}

TEST(LiveMemoryTest, AModelWithPicturesOfSeveralShapesIsWithinTenPercent) {
  ExpectWithinTenPercent(Model("kimi_vl_a3b", {{"vision_config.num_hidden_layers", 4}}),
                         {.documents = {200, 90, 30}, .grids = {{1, 16, 20}, {1, 8, 8}, {1, 16, 20}}});
}

TEST(LiveMemoryTest, ALowRankQueryModelWithAClipAndALargeVocabularyIsWithinTenPercent) {
  ExpectWithinTenPercent(Model("kimi_k2_5", {{"text_config.vocab_size", 4096}}),
                         {.documents = {384}, .grids = {{3, 8, 12}}, .microbatches = 3});
}

TEST(LiveMemoryTest, WithRecomputationToo) {
  const ModelConfig text = Model("moonlight", {{"num_hidden_layers", 6}, {"hidden_size", 128}});
  const ModelConfig pictures = Model("kimi_vl_a3b", {{"vision_config.num_hidden_layers", 4}});
  for (const Recompute recompute : {Recompute::kExperts, Recompute::kLayers}) {
    ExpectWithinTenPercent(text, {.documents = {256, 256}}, recompute);
    ExpectWithinTenPercent(pictures, {.documents = {200, 90, 30}, .grids = {{1, 16, 20}, {1, 8, 8}, {1, 16, 20}}}, recompute);
  }
}

}  // namespace
}  // namespace moonpipe
