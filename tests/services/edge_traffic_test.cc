#include "services/coordinator/edge_traffic.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kRowBytes = 32 * 4;  // of the tiny model

// Two stages (workers 2 and 3) and an encoder (1), tied embeddings.
ClusterPlan Plan() {
  PlanInputs inputs;
  inputs.generation = 1;
  inputs.run = "run-one";
  inputs.model = *ParseModelConfig(TinyTiedConfig().dump());
  inputs.spec.mutable_pipeline()->set_stages(2);
  inputs.spec.mutable_pipeline()->set_microbatches(2);
  inputs.secret = "secret";
  const std::pair<common::v1::WorkerRole, uint32_t> workers[] = {{common::v1::WORKER_ROLE_DATALOADER, 0},
                                                                  {common::v1::WORKER_ROLE_VISION_ENCODER, 0},
                                                                  {common::v1::WORKER_ROLE_DECODER_STAGE, 0},
                                                                  {common::v1::WORKER_ROLE_DECODER_STAGE, 1}};
  for (const auto& [role, ordinal] : workers) {
    RegisteredWorker worker;
    worker.worker = static_cast<uint32_t>(inputs.workers.size());
    worker.registration.set_role(role);
    worker.registration.set_ordinal(ordinal);
    inputs.workers.push_back(worker);
  }
  const auto plan = BuildPlan(inputs);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

ModelConfig Config() { return *ParseModelConfig(TinyTiedConfig().dump()); }

// 20 + 12 tokens, 4 feature rows.
data::v1::StepManifest Manifest() {
  data::v1::StepManifest manifest;
  manifest.set_step(9);
  manifest.add_microbatches()->set_tokens(20);
  manifest.mutable_microbatches(0)->set_feature_rows(4);
  manifest.add_microbatches()->set_tokens(12);
  return manifest;
}

// What every worker should count.
std::map<uint32_t, worker::v1::StepReport> Reports(const ClusterPlan& plan) {
  const std::map<std::string, uint64_t> expected = ExpectedEdgeBytes(plan, Manifest(), Config());
  std::map<uint32_t, worker::v1::StepReport> reports;
  for (const auto& [worker, part] : plan.plans) {
    for (const auto& edge : part.edges()) {
      worker::v1::EdgeBytes& bytes = *reports[worker].add_edges();
      bytes.set_edge(edge.name());
      bytes.set_payload_bytes(expected.at(edge.name()));
    }
  }
  return reports;
}

TEST(EdgeTrafficTest, BytesFollowFromTheManifest) {
  EXPECT_THAT(ExpectedEdgeBytes(Plan(), Manifest(), Config()),
              testing::UnorderedElementsAre(
                  testing::Pair("activation.0", 32 * kRowBytes), testing::Pair("gradient.0", 32 * kRowBytes),
                  testing::Pair("features", 4 * kRowBytes), testing::Pair("feature-gradient", 4 * kRowBytes),
                  testing::Pair("tied-gradient.forward", 448 * kRowBytes), testing::Pair("tied-gradient.back", 448 * kRowBytes)));
}

TEST(EdgeTrafficTest, TheBytesOfTheManifestPass) {
  const ClusterPlan plan = Plan();
  EXPECT_TRUE(CheckEdgeTraffic(plan, Manifest(), Config(), Reports(plan)).ok());
}

TEST(EdgeTrafficTest, AnotherByteCountIsRefusedWithEdgeAndBothNumbers) {
  const ClusterPlan plan = Plan();
  auto reports = Reports(plan);
  for (auto& edge : *reports[3].mutable_edges()) {
    if (edge.edge() == "activation.0") edge.set_payload_bytes(edge.payload_bytes() - kRowBytes);
  }
  const absl::Status refused = CheckEdgeTraffic(plan, Manifest(), Config(), reports);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("worker 3"), HasSubstr("activation.0"), HasSubstr("step 9"),
                                                    HasSubstr(absl::StrCat(32 * kRowBytes)), HasSubstr(absl::StrCat(31 * kRowBytes))));
}

TEST(EdgeTrafficTest, AnEdgeThatNobodyPlannedIsRefused) {
  const ClusterPlan plan = Plan();
  auto reports = Reports(plan);
  reports[2].add_edges()->set_edge("activation.7");
  EXPECT_THAT(std::string(CheckEdgeTraffic(plan, Manifest(), Config(), reports).message()), HasSubstr("activation.7"));
}

TEST(EdgeTrafficTest, AnEdgeThatAWorkerDidNotCountIsRefused) {
  const ClusterPlan plan = Plan();
  auto reports = Reports(plan);
  reports[3].clear_edges();
  const absl::Status refused = CheckEdgeTraffic(plan, Manifest(), Config(), reports);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("worker 3"));
}

}  // namespace
}  // namespace moonpipe
