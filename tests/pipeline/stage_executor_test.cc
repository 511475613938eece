// Any number of executors against one that does it all, and what ends a step.
#include "moonpipe/pipeline/stage_executor.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/pipeline/step_workers.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Not;

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
