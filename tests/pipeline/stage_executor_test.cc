// Steps of a tiny model over in-process edges: any number of executors, each on a thread of its own, against one that does it all.
#include "moonpipe/pipeline/stage_executor.h"

#include <torch/torch.h>

#include <deque>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/comm/in_process_edge.h"
#include "moonpipe/data/step_source.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/pipeline/decoder_stage.h"
#include "moonpipe/pipeline/schedule.h"
#include "moonpipe/pipeline/stage_split.h"
#include "moonpipe/pipeline/vision_stage.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Not;

constexpr uint64_t kGeneration = 3;

ModelConfig Config(bool tied = false) {
  auto config = ParseModelConfig((tied ? TinyTiedConfig() : TinyConfig()).dump());
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

// Four microbatches of the digits; the third has no picture.
const Step& DigitsStep() {
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

std::vector<std::string> Differing(const std::map<std::string, std::string>& a, const std::map<std::string, std::string>& b) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second != bytes) names.push_back(name);
  }
  if (a.size() != b.size()) names.push_back(absl::StrCat(a.size(), " against ", b.size(), " gradients"));
  return names;
}

void ExpectEqualSteps(const Workers::Options& left, const Workers::Options& right) {
  Workers a(left), b(right);
  ASSERT_TRUE(a.Run().ok());
  const absl::Status ran = b.Run();
  ASSERT_TRUE(ran.ok()) << ran;
  ASSERT_EQ(a.Losses().size(), 4U);
  EXPECT_EQ(a.Losses(), b.Losses());
  EXPECT_THAT(Differing(a.Gradients(), b.Gradients()), testing::IsEmpty());
}

TEST(StageExecutorTest, TwoStagesAndAnEncoderGiveTheBitsOfOneExecutor) {
  ExpectEqualSteps({.stages = 1}, {.stages = 2, .vision_in_first_stage = false});
}

TEST(StageExecutorTest, FourStagesGiveTheBitsOfOneExecutor) { ExpectEqualSteps({.stages = 1}, {.stages = 4}); }

TEST(StageExecutorTest, GpipeGivesTheBitsOf1F1B) {
  ExpectEqualSteps({.stages = 2, .vision_in_first_stage = false}, {.stages = 2, .vision_in_first_stage = false, .schedule = "gpipe"});
}

TEST(StageExecutorTest, TiedEmbeddingsGiveTheSameBitsOnOneTwoAndFourStages) {
  ExpectEqualSteps({.stages = 1, .tied = true}, {.stages = 2, .vision_in_first_stage = false, .tied = true});
  ExpectEqualSteps({.stages = 1, .tied = true}, {.stages = 4, .tied = true});
}

TEST(StageExecutorTest, ATiedGradientIsSentAsItWasHoweverLateTheEdgeWritesIt) {
  for (const char* edge : {"tied-gradient.forward", "tied-gradient.back"}) {
    ExpectEqualSteps({.stages = 1, .tied = true}, {.stages = 2, .tied = true, .late_edge = edge});
  }
}

TEST(StageExecutorTest, AFrozenTowerStillSendsItsFeaturesAndTheDecoderTrainsAlike) {
  Workers frozen({.stages = 1, .vision_in_first_stage = false, .vision_frozen = true}), moving({.stages = 1, .vision_in_first_stage = false});
  const absl::Status ran = frozen.Run();
  ASSERT_TRUE(ran.ok()) << ran;
  ASSERT_TRUE(moving.Run().ok());
  EXPECT_EQ(frozen.Losses(), moving.Losses());
  const auto gradients = frozen.Gradients();
  EXPECT_GT(gradients.size(), 50U);
  EXPECT_LT(gradients.size(), moving.Gradients().size());
  const auto expected = moving.Gradients();
  for (const auto& [name, bytes] : gradients) EXPECT_TRUE(bytes == expected.at(name)) << name;
}

TEST(StageExecutorTest, ATiedGradientIsTheSumOfEmbeddingAndHead) {
  Workers tied({.stages = 2, .tied = true});
  // Before the exchange each end has its own share.
  ASSERT_TRUE(tied.Run().ok());
  const std::string name = "language_model.model.embed_tokens.weight";
  // The head pulls at every row, the embedding at those of the microbatches' tokens alone.
  const torch::Tensor gradient = tied.store(0).PublishedGradient(name);
  Workers untied({.stages = 2, .tied = false});
  for (size_t i = 0; i < 2; ++i) {
    torch::NoGradGuard no_grad;
    for (const TensorSpec& spec : untied.store(i).specs()) {
      const std::string from = spec.name == "language_model.lm_head.weight" ? name : spec.name;
      untied.store(i).PublishedValue(spec.name).copy_(tied.store(i).PublishedValue(from));
    }
  }
  ASSERT_TRUE(untied.Run().ok());
  const torch::Tensor sum =
      untied.store(0).PublishedGradient(name) + untied.store(1).PublishedGradient("language_model.lm_head.weight");
  EXPECT_TRUE(torch::equal(gradient, sum)) << (gradient - sum).abs().max().item<float>();
}

TEST(StageExecutorTest, GradientGroupsGiveTheSameBitsOnAnyNumberOfStages) {
  ExpectEqualSteps({.stages = 1, .groups = 2}, {.stages = 2, .vision_in_first_stage = false, .groups = 2});
}

TEST(StageExecutorTest, EveryEdgeCarriesTheBytesOfTheManifest) {
  Workers workers({.stages = 2, .vision_in_first_stage = false, .tied = true});
  ASSERT_TRUE(workers.Run().ok());
  uint64_t tokens = 0, rows = 0;
  for (const auto& microbatch : DigitsStep().manifest.microbatches()) {
    tokens += microbatch.tokens();
    rows += microbatch.feature_rows();
  }
  constexpr uint64_t kRowBytes = 32 * sizeof(float);
  const std::map<std::string, uint64_t> expected = {
      {"features", rows * kRowBytes},      {"feature-gradient", rows * kRowBytes},
      {"activation.0", tokens * kRowBytes}, {"gradient.0", tokens * kRowBytes},
      {"tied-gradient.forward", 448 * kRowBytes}, {"tied-gradient.back", 448 * kRowBytes}};
  std::map<std::string, uint64_t> sent, received;
  for (size_t i = 0; i < workers.size(); ++i) {
    for (const auto& edge : workers.report(i).edges()) {
      (edge.sends() ? sent : received)[edge.edge()] = edge.payload_bytes();
      EXPECT_GT(edge.frame_bytes(), 0U) << edge.edge();
      EXPECT_EQ(edge.transport(), "local");
    }
  }
  EXPECT_EQ(sent, expected);
  EXPECT_EQ(received, expected);

  // A second step counts anew.
  ASSERT_TRUE(workers.Run().ok());
  for (const auto& edge : workers.report(1).edges()) EXPECT_EQ(edge.payload_bytes(), expected.at(edge.edge())) << edge.edge();
}

TEST(StageExecutorTest, AStepDoesNotDependOnTheStepBefore) {
  Workers twice({.stages = 2, .vision_in_first_stage = false}), once({.stages = 2, .vision_in_first_stage = false});
  ASSERT_TRUE(twice.Run().ok());
  ASSERT_TRUE(twice.Run().ok());
  ASSERT_TRUE(once.Run().ok());
  EXPECT_THAT(Differing(twice.Gradients(), once.Gradients()), testing::IsEmpty());
}

TEST(StageExecutorTest, AMicrobatchWithoutPicturesUsesNoFeatureEdge) {
  Workers workers({.stages = 2, .vision_in_first_stage = false});
  ASSERT_TRUE(workers.Run().ok());
  // Three of four microbatches have pictures.
  uint64_t rows = 0;
  for (const auto& edge : workers.report(0).edges()) {
    if (edge.edge() == "features") rows = edge.payload_bytes() / (32 * sizeof(float));
  }
  EXPECT_GT(rows, 0U);
  ASSERT_EQ(DigitsStep().manifest.microbatches(2).feature_rows(), 0U);
  // The encoder still walks all four, so that its list is that of the schedule.
  std::vector<std::string> actions;
  for (const auto& timing : workers.report(0).timings()) actions.push_back(timing.action());
  EXPECT_THAT(actions, AllOf(Contains("VF2"), Contains("VSF2"), Contains("VB2")));
}

TEST(StageExecutorTest, TheStepsLossIsTheMeanOverAllItsLabelsHoweverTheyAreDivided) {
  // The same documents in one microbatch and in four: equal sums, gradients equal up to the order of addition.
  Step joined;
  joined.manifest.set_step(5);
  auto* all = joined.manifest.add_microbatches();
  Microbatch& bytes = joined.microbatches.emplace_back();
  for (int i = 0; i < 4; ++i) {
    const auto& one = DigitsStep().manifest.microbatches(i);
    all->set_tokens(all->tokens() + one.tokens());
    all->set_trained_labels(all->trained_labels() + one.trained_labels());
    all->set_feature_rows(all->feature_rows() + one.feature_rows());
    all->mutable_document_lengths()->MergeFrom(one.document_lengths());
    all->mutable_grids()->MergeFrom(one.grids());
    const Microbatch& from = DigitsStep().microbatches[static_cast<size_t>(i)];
    bytes.token_ids.insert(bytes.token_ids.end(), from.token_ids.begin(), from.token_ids.end());
    bytes.labels.insert(bytes.labels.end(), from.labels.begin(), from.labels.end());
    bytes.patches.insert(bytes.patches.end(), from.patches.begin(), from.patches.end());
  }
  Workers one({.stages = 1}, joined), four({.stages = 1});
  ASSERT_TRUE(one.Run().ok());
  ASSERT_TRUE(four.Run().ok());
  double sum = 0;
  for (const double loss : four.Losses()) sum += loss;
  EXPECT_NEAR(one.Losses().front(), sum, 1e-5 * sum);
  double worst = 0;
  for (const TensorSpec& spec : one.store(0).specs()) {
    if (!spec.trainable) continue;
    const torch::Tensor a = one.store(0).PublishedGradient(spec.name), b = four.store(0).PublishedGradient(spec.name);
    worst = std::max(worst, static_cast<double>((a - b).norm().item<float>() / (1e-6F + a.norm().item<float>())));
  }
  // Sums of a few hundred fp32 terms in another order.
  EXPECT_LT(worst, 1e-4);
}

TEST(StageExecutorTest, LargestLogitsAndTheBalanceLossAreThoseOfTheWholeStep) {
  const DecoderStage::Options recorded = {.balance_loss_weight = 0.5, .qk_clip_threshold = 100};
  struct Numbers {
    std::map<uint32_t, std::vector<float>> largest;  // of each layer's heads
    double balance = 0;
  };
  const auto run = [&](int32_t stages, const Step& step) {
    Workers workers({.stages = stages, .decoder = recorded}, step);
    EXPECT_TRUE(workers.Run().ok());
    Numbers numbers;
    for (size_t worker = 0; worker < workers.size(); ++worker) {
      numbers.balance += workers.report(worker).balance_loss();
      for (const auto& layer : workers.report(worker).largest_logits()) {
        numbers.largest[layer.layer()] = {layer.logits().begin(), layer.logits().end()};
      }
    }
    return numbers;
  };
  // Each microbatch as a step of its own: the maximum over them, and the mean over their documents.
  Numbers wanted;
  int documents = 0;
  bool last_is_largest = true;
  for (int i = 0; i < 4; ++i) {
    Step alone;
    alone.manifest.set_step(5);
    *alone.manifest.add_microbatches() = DigitsStep().manifest.microbatches(i);
    alone.manifest.mutable_microbatches(0)->set_index(0);
    alone.microbatches.push_back(DigitsStep().microbatches[static_cast<size_t>(i)]);
    const Numbers part = run(1, alone);
    const int own = alone.manifest.microbatches(0).document_lengths_size();
    documents += own;
    wanted.balance += own * part.balance;
    for (const auto& [layer, heads] : part.largest) {
      std::vector<float>& most = wanted.largest.try_emplace(layer, heads).first->second;
      for (size_t head = 0; head < heads.size(); ++head) {
        if (i == 3) last_is_largest = last_is_largest && heads[head] >= most[head];
        most[head] = std::max(most[head], heads[head]);
      }
    }
  }
  wanted.balance /= documents;
  ASSERT_GT(documents, 1);
  ASSERT_FALSE(last_is_largest) << "the last microbatch alone would do";
  ASSERT_EQ(wanted.largest.size(), 4U);
  for (const int32_t stages : {1, 2}) {
    const Numbers step = run(stages, DigitsStep());
    EXPECT_NEAR(step.balance, wanted.balance, 1e-5 * wanted.balance) << stages;
    EXPECT_EQ(step.largest, wanted.largest) << stages;
  }
}

// One microbatch of a text, with a picture of one colour (its channel's values are 255) and 2 x `columns` patches before it if columns > 0.
void AddColouredMicrobatch(uint32_t columns, size_t channel, Step& step) {
  auto* manifest = step.manifest.add_microbatches();
  Microbatch& microbatch = step.microbatches.emplace_back();
  const uint32_t rows = columns / 2;
  microbatch.token_ids.assign(rows, 421);
  for (const int32_t id : {7, 300, 12, 45, 90}) microbatch.token_ids.push_back(id);
  microbatch.labels.assign(microbatch.token_ids.size(), -100);
  for (size_t i = rows + 1; i < microbatch.labels.size(); ++i) microbatch.labels[i] = microbatch.token_ids[i];
  if (columns > 0) {
    auto* grid = manifest->add_grids();
    grid->set_frames(1);
    grid->set_rows(2);
    grid->set_columns(columns);
    microbatch.patches.assign(size_t{2} * columns * 588, 0);
    for (size_t i = 0; i < microbatch.patches.size(); ++i) {
      if (i / 196 % 3 == channel) microbatch.patches[i] = 255;
    }
  }
  manifest->set_index(static_cast<uint32_t>(step.microbatches.size() - 1));
  manifest->set_tokens(static_cast<uint32_t>(microbatch.token_ids.size()));
  manifest->add_document_lengths(manifest->tokens());
  manifest->set_feature_rows(rows);
  manifest->set_trained_labels(4);
}

// Columns of patches of the four microbatches; the narrow picture has the channel `narrow`, the wide one `wide`.
Step ColouredStep(const std::vector<uint32_t>& columns, size_t narrow, size_t wide) {
  Step step;
  step.manifest.set_step(5);
  for (const uint32_t count : columns) AddColouredMicrobatch(count, count == 2 ? narrow : wide, step);
  return step;
}

TEST(StageExecutorTest, PicturesStayWithTheirMicrobatch) {
  constexpr size_t kRed = 0, kBlue = 2;
  for (const std::vector<uint32_t>& columns : {std::vector<uint32_t>{0, 2, 0, 4}, std::vector<uint32_t>{2, 0, 0, 4}}) {
    const Step step = ColouredStep(columns, kRed, kBlue);
    const Step exchanged_step = ColouredStep(columns, kBlue, kRed);
    Workers together({.stages = 2, .vision_in_first_stage = false}, step);
    Workers exchanged({.stages = 2, .vision_in_first_stage = false}, exchanged_step);
    ASSERT_TRUE(together.Run().ok());
    ASSERT_TRUE(exchanged.Run().ok());
    std::map<std::string, torch::Tensor> sums;
    for (size_t i = 0; i < columns.size(); ++i) {
      Step single;
      single.manifest.set_step(5);
      AddColouredMicrobatch(columns[i], columns[i] == 2 ? kRed : kBlue, single);
      Workers alone({.stages = 1}, single);
      ASSERT_TRUE(alone.Run().ok());
      EXPECT_NEAR(alone.Losses().front(), together.Losses()[i], 1e-5 * together.Losses()[i]) << i;
      if (columns[i] > 0) {
        EXPECT_GT(std::abs(exchanged.Losses()[i] - together.Losses()[i]), 1e-6) << i;
      } else {
        EXPECT_EQ(exchanged.Losses()[i], together.Losses()[i]) << i;
      }
      for (const TensorSpec& spec : alone.store(0).specs()) {
        if (!spec.trainable) continue;
        const torch::Tensor gradient = alone.store(0).PublishedGradient(spec.name);
        if (!gradient.defined()) continue;
        torch::Tensor& sum = sums[spec.name];
        sum = sum.defined() ? sum + gradient / 4 : gradient / 4;  // four equal shares of the step's labels
      }
    }
    size_t compared = 0;
    for (size_t worker = 0; worker < together.size(); ++worker) {
      for (const TensorSpec& spec : together.store(worker).specs()) {
        if (!spec.trainable) continue;
        const torch::Tensor gradient = together.store(worker).PublishedGradient(spec.name);
        ASSERT_TRUE(sums.contains(spec.name)) << spec.name;
        EXPECT_LT((gradient - sums[spec.name]).norm().item<float>(), 1e-5F * (1e-3F + gradient.norm().item<float>())) << spec.name;
        ++compared;
      }
    }
    EXPECT_GE(compared, sums.size());
  }
}

// The digits with the pictures of a microbatch masked: their placeholders leave the sequence.
Step MaskPictures(Step step, uint32_t index) {
  auto& manifest = *step.manifest.mutable_microbatches(static_cast<int>(index));
  Microbatch& microbatch = step.microbatches[index];
  Microbatch kept = microbatch;
  kept.token_ids.clear();
  kept.labels.clear();
  size_t begin = 0;
  std::vector<uint32_t> lengths;
  for (const uint32_t length : manifest.document_lengths()) {
    uint32_t left = 0;
    for (size_t i = begin; i < begin + length; ++i) {
      if (microbatch.token_ids[i] == 421) continue;
      kept.token_ids.push_back(microbatch.token_ids[i]);
      kept.labels.push_back(microbatch.labels[i]);
      ++left;
    }
    lengths.push_back(left);
    begin += length;
  }
  microbatch = kept;
  manifest.mutable_document_lengths()->Assign(lengths.begin(), lengths.end());
  manifest.set_tokens(static_cast<uint32_t>(kept.token_ids.size()));
  auto* span = manifest.add_masked_features();
  span->set_begin(0);
  span->set_end(manifest.feature_rows());
  return step;
}

TEST(StageExecutorTest, AMaskedPictureIsEncodedAndLeavesVisionGradientsOfExactlyZero) {
  Step step = DigitsStep();
  for (const uint32_t index : {0U, 1U, 3U}) step = MaskPictures(step, index);
  // The same text without any picture at all.
  Step text = step;
  for (auto& manifest : *text.manifest.mutable_microbatches()) {
    manifest.clear_grids();
    manifest.clear_feature_rows();
    manifest.clear_masked_features();
  }
  for (const int stages : {1, 2}) {
    Workers masked({.stages = stages, .vision_in_first_stage = false}, step), without({.stages = stages, .vision_in_first_stage = false}, text);
    ASSERT_TRUE(masked.Run().ok());
    ASSERT_TRUE(without.Run().ok());
    EXPECT_EQ(masked.Losses(), without.Losses());
    // It went through the tower: the features were sent.
    EXPECT_GT(masked.report(0).edges(0).payload_bytes(), 0U);
    EXPECT_EQ(without.report(0).edges(0).payload_bytes(), 0U);
    const auto a = masked.Gradients(), b = without.Gradients();
    for (const auto& [name, bytes] : b) {
      if (name.find("language_model") == 0) {
        EXPECT_EQ(a.at(name), bytes) << name;
      }
    }
    // Exactly zero, whatever its sign.
    int vision = 0;
    for (const TensorSpec& spec : masked.store(0).specs()) {
      if (!spec.trainable) continue;
      EXPECT_EQ(masked.store(0).PublishedGradient(spec.name).abs().max().item<float>(), 0) << spec.name;
      ++vision;
    }
    EXPECT_GT(vision, 20);
    const auto& counts = masked.report(masked.size() - 1).expert_counts();
    ASSERT_GT(counts.size(), 0);
    uint64_t routed = 0, tokens = 0;
    for (const uint64_t count : counts.rbegin()->counts()) routed += count;
    for (const auto& manifest : step.manifest.microbatches()) tokens += manifest.tokens();
    EXPECT_EQ(routed % tokens, 0U) << "every token that is left goes to the same number of experts, and no other token does";
    EXPECT_EQ(routed, tokens * static_cast<uint64_t>(Config().text.num_experts_per_tok));
  }
}

TEST(StageExecutorTest, AStepMayStartFromEmbeddings) {
  // The text's own embeddings, handed in, give the text's losses.
  Step text = DigitsStep();
  for (const uint32_t index : {0U, 1U, 3U}) text = MaskPictures(text, index);
  for (auto& manifest : *text.manifest.mutable_microbatches()) {
    manifest.clear_grids();
    manifest.clear_feature_rows();
    manifest.clear_masked_features();
  }
  Workers tokens({.stages = 2}, text);
  ASSERT_TRUE(tokens.Run().ok());
  Step embeddings = text;
  const torch::Tensor table = tokens.store(0).PublishedValue(tokens.store(0).decoder_prefix() + "embed_tokens.weight").detach().contiguous();
  const int64_t hidden = table.size(1);
  for (size_t i = 0; i < embeddings.microbatches.size(); ++i) {
    Microbatch& microbatch = embeddings.microbatches[i];
    for (const int32_t id : microbatch.token_ids) {
      const float* row = table.const_data_ptr<float>() + id * hidden;
      microbatch.embeddings.insert(microbatch.embeddings.end(), row, row + hidden);
    }
    microbatch.token_ids.clear();
    embeddings.manifest.mutable_microbatches(static_cast<int>(i))->set_has_embeddings(true);
  }
  Workers started({.stages = 2}, embeddings);
  ASSERT_TRUE(started.Run().ok());
  EXPECT_EQ(started.Losses(), tokens.Losses());
  EXPECT_EQ(started.store(0).PublishedGradient(tokens.store(0).decoder_prefix() + "embed_tokens.weight").abs().max().item<float>(), 0);
}

TEST(StageExecutorTest, LabelsThatAreNotThoseOfTheManifestAreRefusedWithBothNumbers) {
  Step step = DigitsStep();
  // One label less than announced.
  std::vector<int32_t>& labels = step.microbatches[1].labels;
  *std::find_if(labels.begin(), labels.end(), [](int32_t label) { return label != -100; }) = -100;
  const uint32_t announced = step.manifest.microbatches(1).trained_labels();
  Workers workers({.stages = 1}, step);
  EXPECT_THAT(std::string(workers.Run().message()), AllOf(HasSubstr(absl::StrCat("trains ", announced - 1, " labels")), HasSubstr(absl::StrCat("announces ", announced))));
}

TEST(StageExecutorTest, AWrongHeaderEndsTheStepWithBothHeadersAndTheActionThatMetIt) {
  EdgeFaults faults;
  faults.rewrite_header = [](uint64_t message, MessageHeader& header) {
    if (message == 1) header.step += 1;
  };
  Workers workers({.stages = 2, .faults = {{"activation.0", faults}}});
  const absl::Status failed = workers.Run();
  EXPECT_EQ(failed.code(), absl::StatusCode::kFailedPrecondition) << failed;
  EXPECT_THAT(std::string(failed.message()),
              AllOf(HasSubstr("1RA1"), HasSubstr("activation.0"), HasSubstr("step 5"), HasSubstr("step 6")));
  EXPECT_EQ(workers.position().action, "1RA1");
  EXPECT_EQ(workers.position().edge, "activation.0");
  EXPECT_EQ(workers.position().microbatch, 1);
}

TEST(StageExecutorTest, AStaleGenerationIsRefused) {
  Workers workers({.stages = 2, .vision_in_first_stage = false});
  workers.run(0).set_generation(kGeneration - 1);
  const absl::Status failed = workers.Run();
  EXPECT_EQ(failed.code(), absl::StatusCode::kFailedPrecondition) << failed;
  EXPECT_THAT(std::string(failed.message()), AllOf(HasSubstr("generation 2"), HasSubstr("generation 3"), HasSubstr("features")));
}

TEST(StageExecutorTest, ADroppedConnectionIsUnavailableAtTheMicrobatchThatDidNotPass) {
  EdgeFaults faults;
  faults.drop_after_messages = 2;
  Workers workers({.stages = 2, .faults = {{"gradient.0", faults}}});
  const absl::Status failed = workers.Run();
  EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable) << failed;
  EXPECT_THAT(std::string(failed.message()), HasSubstr("gradient.0"));
  EXPECT_EQ(workers.position().edge, "gradient.0");
  EXPECT_EQ(workers.position().microbatch, 2);
  EXPECT_THAT(workers.position().action, testing::AnyOf("0RG2", "1SG2"));
}

TEST(StageExecutorTest, DamagedFeaturesAreNotTrainedOn) {
  EdgeFaults faults;
  faults.corrupt = EdgeFaults::Corrupt{.message = 0, .byte = 17};
  Workers workers({.stages = 1, .vision_in_first_stage = false, .faults = {{"features", faults}}});
  const absl::Status failed = workers.Run();
  EXPECT_EQ(failed.code(), absl::StatusCode::kDataLoss) << failed;
  EXPECT_EQ(workers.position().action, "0RF0");
}

TEST(StageExecutorTest, AnAbortEndsAWaitAtOnceWithItsReason) {
  EdgeFaults faults;
  faults.hold = true;  // nothing arrives
  Workers workers({.stages = 2, .faults = {{"activation.0", faults}}});
  workers.on_action = [&](int32_t chunk, const std::string& action, const std::string&) {
    // Stage 0 has sent all it can and is about to wait for a gradient: both stages wait now or soon.
    if (chunk == 0 && action == "0RG0") workers.AbortReceivers(absl::AbortedError("the coordinator ends the step"));
  };
  const absl::Status failed = workers.Run(absl::InfiniteDuration());
  EXPECT_EQ(failed.code(), absl::StatusCode::kAborted) << failed;
  EXPECT_THAT(std::string(failed.message()), HasSubstr("the coordinator ends the step"));
  EXPECT_THAT(workers.position().edge, testing::AnyOf("activation.0", "gradient.0"));
}

TEST(StageExecutorTest, AWaitEndsAtTheStepsDeadline) {
  EdgeFaults faults;
  faults.hold = true;
  Workers workers({.stages = 2, .faults = {{"activation.0", faults}}});
  const absl::Status failed = workers.Run(absl::Milliseconds(200));
  EXPECT_EQ(failed.code(), absl::StatusCode::kDeadlineExceeded) << failed;
  EXPECT_THAT(std::string(failed.message()), testing::AnyOf(HasSubstr("activation.0"), HasSubstr("gradient.0")));
}

TEST(StageExecutorTest, AnActionOfAnotherWorkerIsRefused) {
  Workers workers({.stages = 1});
  workers.run(0).set_actions(0, "1F0");
  const absl::Status failed = workers.Run();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInvalidArgument) << failed;
  EXPECT_THAT(std::string(failed.message()), HasSubstr("1F0"));
}

TEST(StageExecutorTest, AMicrobatchOutsideTheManifestIsRefused) {
  Workers workers({.stages = 1});
  workers.run(0).set_actions(0, "0F4");
  const absl::Status failed = workers.Run();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInvalidArgument) << failed;
  EXPECT_THAT(std::string(failed.message()), AllOf(HasSubstr("microbatch 4"), HasSubstr("manifest of 4")));
}

TEST(StageExecutorTest, FeaturesThatDoNotMatchTheTokensAreRefusedWithBothNumbers) {
  // A tokens view whose placeholders are fewer than the feature rows of the manifest.
  Step step = DigitsStep();
  for (int32_t& token : step.microbatches[0].token_ids) {
    if (token == 421) {
      token = 65;
      break;
    }
  }
  Workers workers({.stages = 1, .vision_in_first_stage = false}, step);
  const absl::Status failed = workers.Run();
  EXPECT_FALSE(failed.ok());
  const uint32_t rows = step.manifest.microbatches(0).feature_rows();
  EXPECT_THAT(std::string(failed.message()), AllOf(HasSubstr(absl::StrCat(rows)), HasSubstr(absl::StrCat(rows - 1)), HasSubstr("0F0")));
}

TEST(StageExecutorTest, PixelsOfAnotherSizeAreRefusedWithBothNumbers) {
  Step step = DigitsStep();
  step.microbatches[1].patches.pop_back();
  Workers workers({.stages = 1, .vision_in_first_stage = false}, step);
  const absl::Status failed = workers.Run();
  EXPECT_EQ(failed.code(), absl::StatusCode::kDataLoss) << failed;
  const size_t bytes = step.microbatches[1].patches.size();
  EXPECT_THAT(std::string(failed.message()),
              AllOf(HasSubstr("microbatch 1"), HasSubstr(absl::StrCat(bytes)), HasSubstr(absl::StrCat(bytes + 1)), HasSubstr("VF1")));
}

TEST(StageExecutorTest, DecodingGivesTheNextTokenOfEveryDocumentOnAnyNumberOfStages) {
  auto decode = [](int32_t stages) {
    Workers workers({.stages = stages, .vision_in_first_stage = false});
    ScheduleOptions options;
    options.stages = stages;
    options.microbatches = 4;
    options.forward_only = true;
    const auto schedule = MakeSchedule(options);
    EXPECT_TRUE(schedule.ok());
    for (size_t i = 0; i < workers.size(); ++i) {
      workers.run(i).set_decode(true);
      workers.run(i).clear_actions();
      for (const Action& action : schedule->workers[i].actions) workers.run(i).add_actions(action.ToString());
    }
    EXPECT_TRUE(workers.Run().ok());
    const auto& tokens = workers.report(workers.size() - 1).next_tokens();
    return std::vector<int32_t>(tokens.begin(), tokens.end());
  };
  const std::vector<int32_t> one = decode(1);
  size_t documents = 0;
  for (const auto& microbatch : DigitsStep().manifest.microbatches()) documents += static_cast<size_t>(microbatch.document_lengths_size());
  EXPECT_EQ(one.size(), documents);
  EXPECT_EQ(decode(2), one);
  EXPECT_EQ(decode(4), one);
}

}  // namespace
}  // namespace moonpipe
