#include "services/coordinator/plan_builder.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/coordinator/run_step_builder.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

RegisteredWorker Worker(uint32_t number, common::v1::WorkerRole role, uint32_t ordinal) {
  RegisteredWorker worker;
  worker.worker = number;
  worker.registration.set_role(role);
  worker.registration.set_ordinal(ordinal);
  worker.registration.set_address(absl::StrCat("host", number, ":1"));
  return worker;
}

// A dataloader (0), an encoder (1) and `stages` stages that came in reverse order (numbers from 2).
PlanInputs Inputs(uint32_t stages) {
  PlanInputs inputs;
  inputs.generation = 7;
  inputs.run = "run-one";
  inputs.model = *ReadModelConfig(TEST_DATA_DIR "/fixtures/kimi_vl_a3b/config.json");
  inputs.spec.mutable_pipeline()->set_stages(stages);
  inputs.spec.mutable_pipeline()->set_microbatches(3);
  inputs.cursor.set_window(5);
  inputs.secret = "secret";
  inputs.workers.push_back(Worker(0, common::v1::WORKER_ROLE_DATALOADER, 0));
  inputs.workers.push_back(Worker(1, common::v1::WORKER_ROLE_VISION_ENCODER, 0));
  for (uint32_t i = 0; i < stages; ++i) {
    inputs.workers.push_back(Worker(2 + i, common::v1::WORKER_ROLE_DECODER_STAGE, stages - 1 - i));
  }
  return inputs;
}

std::vector<std::string> EdgeNames(const worker::v1::Plan& plan) {
  std::vector<std::string> names;
  for (const auto& edge : plan.edges()) names.push_back(edge.name());
  return names;
}

data::v1::StepManifest Manifest() {
  data::v1::StepManifest manifest;
  manifest.set_step(9);
  manifest.set_digest("digest");
  for (uint32_t i = 0; i < 2; ++i) {
    auto* microbatch = manifest.add_microbatches();
    microbatch->set_index(i);
    microbatch->set_tokens(20);
    microbatch->add_document_lengths(20);
    microbatch->set_trained_labels(3 + i);
    microbatch->add_samples(100 + i);
  }
  auto* grid = manifest.mutable_microbatches(1)->add_grids();
  grid->set_frames(1);
  grid->set_rows(4);
  grid->set_columns(4);
  manifest.mutable_microbatches(1)->set_feature_rows(4);
  return manifest;
}

TEST(PlanBuilderTest, EveryWorkerGetsItsPlaceByTheNumberItWishedFor) {
  auto plan = BuildPlan(Inputs(2));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->dataloader, 0U);
  EXPECT_EQ(plan->encoder, 1U);
  EXPECT_THAT(plan->stages, ElementsAre(3, 2));
  EXPECT_THAT(plan->ScheduleWorkers(), ElementsAre(1, 3, 2));
  ASSERT_EQ(plan->plans.size(), 4U);
  const worker::v1::Plan& encoder = plan->plans.at(1);
  EXPECT_TRUE(encoder.part().has_vision());
  EXPECT_FALSE(encoder.part().has_embedding());
  EXPECT_EQ(encoder.part().first_layer(), encoder.part().end_layer());
  const worker::v1::Plan& first = plan->plans.at(3);
  const worker::v1::Plan& last = plan->plans.at(2);
  EXPECT_EQ(first.part().stage(), 0U);
  EXPECT_TRUE(first.part().has_embedding());
  EXPECT_FALSE(first.part().has_vision());
  EXPECT_FALSE(first.part().has_head());
  EXPECT_EQ(first.part().end_layer(), last.part().first_layer());
  EXPECT_EQ(last.part().end_layer(), 4U);
  EXPECT_TRUE(last.part().has_head());
  for (const auto& [number, one] : plan->plans) {
    EXPECT_EQ(one.worker(), number);
    EXPECT_EQ(one.generation(), 7U);
    EXPECT_EQ(one.run(), "run-one");
    EXPECT_EQ(one.stages(), 2U);
    EXPECT_THAT(one.model_config_json(), HasSubstr("kimi_vl"));
    EXPECT_EQ(one.data_address(), number == 0 ? "" : "host0:1");
    EXPECT_EQ(one.has_part(), number != 0);
    EXPECT_EQ(one.has_cursor(), number == 0);
  }
  EXPECT_EQ(plan->plans.at(0).cursor().window(), 5U);
}

TEST(PlanBuilderTest, EdgesJoinTheRightWorkersInOneOrderForAll) {
  auto plan = BuildPlan(Inputs(3));
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_THAT(plan->stages, ElementsAre(4, 3, 2));
  EXPECT_THAT(EdgeNames(plan->plans.at(0)), IsEmpty());
  EXPECT_THAT(EdgeNames(plan->plans.at(1)), ElementsAre("features", "feature-gradient"));
  EXPECT_THAT(EdgeNames(plan->plans.at(4)), ElementsAre("features", "feature-gradient", "activation.0", "gradient.0"));
  EXPECT_THAT(EdgeNames(plan->plans.at(3)), ElementsAre("activation.0", "gradient.0", "activation.1", "gradient.1"));
  EXPECT_THAT(EdgeNames(plan->plans.at(2)), ElementsAre("activation.1", "gradient.1"));
  const auto& edges = plan->plans.at(3).edges();
  EXPECT_EQ(edges[0].sender(), 4U);
  EXPECT_EQ(edges[0].receiver(), 3U);
  EXPECT_EQ(edges[1].sender(), 3U);
  EXPECT_EQ(edges[1].receiver(), 4U);
  EXPECT_EQ(edges[3].sender(), 2U);
  EXPECT_EQ(edges[0].max_message_bytes(), uint64_t{1} << 30);
}

TEST(PlanBuilderTest, TiedEmbeddingsJoinTheFirstAndTheLastStage) {
  PlanInputs inputs = Inputs(3);
  inputs.model.text.tie_word_embeddings = true;
  inputs.spec.mutable_runtime()->set_max_edge_message_bytes(5 << 20);
  auto plan = BuildPlan(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(EdgeNames(plan->plans.at(2)),
              ElementsAre("activation.1", "gradient.1", "tied-gradient.forward", "tied-gradient.back"));
  const worker::v1::EdgePlan& forward = plan->plans.at(2).edges(2);
  EXPECT_EQ(forward.sender(), plan->stages.front());
  EXPECT_EQ(forward.receiver(), plan->stages.back());
  EXPECT_EQ(forward.max_message_bytes(), uint64_t{5} << 20);
  PlanInputs single = Inputs(1);
  single.model.text.tie_word_embeddings = true;
  auto alone = BuildPlan(single);
  ASSERT_TRUE(alone.ok());
  EXPECT_THAT(EdgeNames(alone->plans.at(2)), ElementsAre("features", "feature-gradient"));
}

TEST(PlanBuilderTest, NobodyMayFetchMoreThanItsPartNeeds) {
  auto plan = BuildPlan(Inputs(3));
  ASSERT_TRUE(plan.ok());
  const worker::v1::Plan& loader = plan->plans.at(0);
  std::map<uint32_t, std::vector<int>> views;
  std::set<std::string> tokens;
  for (const auto& grant : loader.grants()) {
    EXPECT_EQ(grant.access_token(), plan->plans.at(grant.worker()).access_token());
    EXPECT_EQ(grant.access_token().size(), 64U);
    tokens.insert(grant.access_token());
    for (int view : grant.views()) views[grant.worker()].push_back(view);
  }
  EXPECT_EQ(tokens.size(), 3U);
  EXPECT_EQ(views.size(), 3U);
  EXPECT_THAT(views[1], ElementsAre(data::v1::MICROBATCH_VIEW_PIXELS));
  EXPECT_THAT(views[4], ElementsAre(data::v1::MICROBATCH_VIEW_TOKENS));
  EXPECT_THAT(views[2], ElementsAre(data::v1::MICROBATCH_VIEW_LABELS));
  EXPECT_EQ(plan->plans.at(3).access_token(), "");  // a stage in the middle fetches nothing
  EXPECT_EQ(loader.access_token(), "");
  EXPECT_EQ(loader.edge_token(), "");
  EXPECT_THAT(plan->plans.at(3).edge_token(), Not(IsEmpty()));
}

TEST(PlanBuilderTest, TokensChangeWithEveryPlanAndWithTheSecret) {
  PlanInputs inputs = Inputs(2);
  const ClusterPlan first = *BuildPlan(inputs);
  inputs.generation = 8;
  const ClusterPlan second = *BuildPlan(inputs);
  inputs.secret = "another";
  const ClusterPlan third = *BuildPlan(inputs);
  const std::set<std::string> tokens = {first.plans.at(1).access_token(), second.plans.at(1).access_token(),
                                        third.plans.at(1).access_token(), first.plans.at(1).edge_token(),
                                        second.plans.at(1).edge_token(),  third.plans.at(1).edge_token()};
  EXPECT_EQ(tokens.size(), 6U);
}

TEST(PlanBuilderTest, TheFirstStageOwnsTheTowerWhereTheSpecSaysSo) {
  PlanInputs inputs = Inputs(1);
  inputs.spec.mutable_vision()->set_placement(cluster::v1::VisionSpec::PLACEMENT_FIRST_STAGE);
  inputs.workers.erase(inputs.workers.begin() + 1);
  auto plan = BuildPlan(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->encoder.has_value());
  EXPECT_TRUE(plan->plans.at(2).part().has_vision());
  EXPECT_THAT(EdgeNames(plan->plans.at(2)), IsEmpty());
  ASSERT_EQ(plan->plans.at(0).grants_size(), 1);
  EXPECT_EQ(plan->plans.at(0).grants(0).views_size(), 3);
}

TEST(PlanBuilderTest, AModelWithoutATowerNeedsNoEncoder) {
  PlanInputs inputs = Inputs(2);
  inputs.model.vision.reset();
  auto plan = BuildPlan(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->encoder.has_value());
  EXPECT_EQ(plan->plans.count(1), 0U);
  for (const auto& grant : plan->plans.at(0).grants())
    EXPECT_THAT(grant.views(), Not(testing::Contains(data::v1::MICROBATCH_VIEW_PIXELS)));
}

TEST(PlanBuilderTest, SaysWhoIsMissing) {
  PlanInputs inputs = Inputs(3);
  inputs.workers = {inputs.workers[2]};
  const absl::Status status = BuildPlan(inputs).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "waits for a dataloader, a vision encoder, 2 of 3 decoder stages");
}

TEST(PlanBuilderTest, SpareWorkersStayOut) {
  PlanInputs inputs = Inputs(2);
  inputs.workers.push_back(Worker(9, common::v1::WORKER_ROLE_DECODER_STAGE, 5));
  inputs.workers.push_back(Worker(10, common::v1::WORKER_ROLE_DATALOADER, 1));
  auto plan = BuildPlan(inputs);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->plans.count(9) + plan->plans.count(10), 0U);
}

TEST(PlanBuilderTest, ImpossibleSpecsAreErrorsEvenWhileWorkersAreMissing) {
  PlanInputs inputs = Inputs(2);
  inputs.workers.clear();
  inputs.spec.mutable_pipeline()->set_stages(5);
  EXPECT_EQ(BuildPlan(inputs).status().code(), absl::StatusCode::kInvalidArgument);
  inputs.spec.mutable_pipeline()->set_stages(2);
  inputs.spec.mutable_pipeline()->set_schedule("2f2b");
  EXPECT_THAT(std::string(BuildPlan(inputs).status().message()), HasSubstr("2f2b"));
  inputs.spec.mutable_pipeline()->set_schedule("gpipe");
  inputs.spec.mutable_pipeline()->add_layers_per_stage(4);
  EXPECT_EQ(BuildPlan(inputs).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(RunStepBuilderTest, EveryWorkerSeesItsViewOfTheManifestAndItsActions) {
  const ClusterPlan plan = *BuildPlan(Inputs(2));
  auto steps = MakeRunSteps(plan, Manifest());
  ASSERT_TRUE(steps.ok()) << steps.status();
  ASSERT_EQ(steps->size(), 3U);
  const worker::v1::RunStep& encoder = steps->at(1);
  const worker::v1::RunStep& first = steps->at(3);
  const worker::v1::RunStep& last = steps->at(2);
  for (const worker::v1::RunStep* step : {&encoder, &first, &last}) {
    EXPECT_EQ(step->generation(), 7U);
    EXPECT_EQ(step->step(), 9U);
    EXPECT_EQ(step->trained_labels(), 7U);
    EXPECT_EQ(step->manifest().digest(), "");
    EXPECT_EQ(step->manifest().microbatches(1).tokens(), 20U);
    EXPECT_TRUE(step->manifest().microbatches(1).samples().empty());
    EXPECT_FALSE(step->decode());
  }
  EXPECT_EQ(encoder.manifest().microbatches(1).grids_size(), 1);
  EXPECT_EQ(first.manifest().microbatches(1).grids_size(), 0);
  EXPECT_EQ(last.manifest().microbatches(1).grids_size(), 0);
  EXPECT_EQ(encoder.manifest().microbatches(1).feature_rows(), 4U);
  EXPECT_EQ(first.manifest().microbatches(1).feature_rows(), 4U);
  EXPECT_EQ(last.manifest().microbatches(1).feature_rows(), 0U);
  EXPECT_EQ(last.manifest().microbatches(1).trained_labels(), 4U);
  EXPECT_EQ(first.manifest().microbatches(1).trained_labels(), 0U);
  EXPECT_EQ(encoder.actions(0), "VF0");
  EXPECT_EQ(first.actions(0), "0RF0");
  EXPECT_EQ(last.actions(0), "1RA0");
  EXPECT_EQ(last.actions(last.actions_size() - 1), "1RP");
}

TEST(RunStepBuilderTest, WhatAPictureOrAnEmbeddingIsGoesToWhoNeedsIt) {
  data::v1::StepManifest manifest = Manifest();
  manifest.mutable_microbatches(1)->set_pixel_type(data::v1::PIXEL_TYPE_F32);
  manifest.mutable_microbatches(1)->add_masked_features()->set_end(2);
  manifest.mutable_microbatches(0)->set_has_embeddings(true);
  auto steps = MakeRunSteps(*BuildPlan(Inputs(2)), manifest);
  ASSERT_TRUE(steps.ok()) << steps.status();
  const auto& encoder = steps->at(1).manifest();
  const auto& first = steps->at(3).manifest();
  const auto& last = steps->at(2).manifest();
  EXPECT_EQ(encoder.microbatches(1).pixel_type(), data::v1::PIXEL_TYPE_F32);
  EXPECT_EQ(encoder.microbatches(1).masked_features_size(), 0);
  EXPECT_EQ(first.microbatches(1).masked_features_size(), 1);
  EXPECT_EQ(last.microbatches(1).masked_features_size(), 0);
  EXPECT_TRUE(first.microbatches(0).has_embeddings());
  EXPECT_FALSE(last.microbatches(0).has_embeddings());
}

TEST(PlanBuilderTest, EmbeddingsOfARecordedBatchAreTheFirstStagesAlone) {
  PlanInputs inputs = Inputs(2);
  inputs.spec.mutable_data()->set_batches("io.safetensors");
  const ClusterPlan plan = *BuildPlan(inputs);
  for (const worker::v1::DataGrant& grant : plan.plans.at(plan.dataloader).grants()) {
    const bool embeddings = std::find(grant.views().begin(), grant.views().end(), data::v1::MICROBATCH_VIEW_EMBEDDINGS) != grant.views().end();
    EXPECT_EQ(embeddings, grant.worker() == plan.stages[0]);
  }
}

TEST(RunStepBuilderTest, DecodingGoesForwardOverAnyNumberOfMicrobatches) {
  const ClusterPlan plan = *BuildPlan(Inputs(2));
  auto steps = MakeRunSteps(plan, Manifest(), /*decode=*/true, /*zero_features=*/true);
  ASSERT_TRUE(steps.ok());
  EXPECT_TRUE(steps->at(3).decode());
  EXPECT_TRUE(steps->at(3).zero_features());
  EXPECT_THAT(steps->at(2).actions(), ElementsAre("1RA0", "1F0", "1RA1", "1F1", "1RP"));
}

TEST(RunStepBuilderTest, AManifestOutOfOrderIsRefused) {
  const ClusterPlan plan = *BuildPlan(Inputs(2));
  data::v1::StepManifest manifest = Manifest();
  manifest.mutable_microbatches(0)->set_index(1);
  EXPECT_THAT(std::string(MakeRunSteps(plan, manifest).status().message()),
              HasSubstr("microbatch 1 stands at place 0"));
  EXPECT_FALSE(MakeRunSteps(plan, data::v1::StepManifest()).ok());
}

TEST(RunStepBuilderTest, AStepWhoseFeaturesExceedTheLimitIsRefusedWithBothSizes) {
  PlanInputs inputs = Inputs(2);
  inputs.spec.mutable_runtime()->set_max_edge_message_bytes(64 * 20 * 4);
  data::v1::StepManifest manifest = Manifest();
  EXPECT_TRUE(CheckMessagesFit(*BuildPlan(inputs), inputs.model, manifest).ok());
  manifest.mutable_microbatches(1)->set_feature_rows(21);
  EXPECT_THAT(std::string(CheckMessagesFit(*BuildPlan(inputs), inputs.model, manifest).message()),
              AllOf(HasSubstr("microbatch 1"), HasSubstr("features"), HasSubstr("5376"), HasSubstr("5120")));
  manifest.mutable_microbatches(1)->set_feature_rows(4);
  manifest.mutable_microbatches(0)->set_tokens(30);
  EXPECT_THAT(std::string(CheckMessagesFit(*BuildPlan(inputs), inputs.model, manifest).message()),
              HasSubstr("activation.0"));
}

}  // namespace
}  // namespace moonpipe
