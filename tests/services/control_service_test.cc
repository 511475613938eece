#include "services/coordinator/control_service.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/runtime/channel.h"
#include "moonpipe/runtime/rpc_error.h"
#include "moonpipe/runtime/server.h"

namespace moonpipe {
namespace {

using namespace cluster::v1;  // NOLINT: this file is about nothing else
using testing::ElementsAre;
using testing::HasSubstr;

TrainingRunSpec DigitsSpec() {
  const auto spec = LoadRunFile(SOURCE_DIR "/examples/digits/run.yaml", {});
  EXPECT_TRUE(spec.ok()) << spec.status();
  return *spec;
}

CreateTrainingRunRequest RequestOf(TrainingRunSpec spec) {
  CreateTrainingRunRequest request;
  *request.mutable_spec() = std::move(spec);
  request.set_training_run_id("digits");
  return request;
}

// field of the only violation, and its description
std::pair<std::string, std::string> ViolationOf(const CreateTrainingRunRequest& request) {
  TrainingRunSpec resolved;
  const absl::Status status = CheckCreateRequest(request, &resolved);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorReason(status), "INVALID_SPEC");
  const auto bad = GetDetail<google::rpc::BadRequest>(status);
  if (!bad.has_value() || bad->field_violations_size() != 1) return {};
  return {bad->field_violations(0).field(), bad->field_violations(0).description()};
}

TEST(CheckCreateRequestTest, TakesAGoodSpecAndFillsDefaultsIn) {
  TrainingRunSpec resolved;
  EXPECT_TRUE(CheckCreateRequest(RequestOf(DigitsSpec()), &resolved).ok());
  EXPECT_EQ(resolved.pipeline().schedule(), "1f1b");
  EXPECT_EQ(resolved.checkpoint().keep_last(), 2u);
}

TEST(CheckCreateRequestTest, RefusesIdsThatAreNoNames) {
  for (const char* id : {"", "abc", "Digits", "1digits", "di_gits", "-digits"}) {
    CreateTrainingRunRequest request = RequestOf(DigitsSpec());
    request.set_training_run_id(id);
    EXPECT_EQ(ViolationOf(request).first, "training_run_id") << id;
  }
}

TEST(CheckCreateRequestTest, RefusesWhatTheModelDoesNotAllow) {
  TrainingRunSpec spec = DigitsSpec();
  spec.mutable_model()->set_config("/nowhere/config.json");
  EXPECT_EQ(ViolationOf(RequestOf(spec)).first, "spec.model.config");

  spec = DigitsSpec();
  spec.mutable_pipeline()->set_stages(64);
  EXPECT_EQ(ViolationOf(RequestOf(spec)).first, "spec.pipeline.stages");

  spec = DigitsSpec();
  spec.mutable_optimizer()->add_groups()->set_match("visoin");
  const auto [field, description] = ViolationOf(RequestOf(spec));
  EXPECT_EQ(field, "spec.optimizer.groups");
  EXPECT_THAT(description, HasSubstr("visoin"));

  spec = DigitsSpec();
  spec.mutable_model()->clear_config();
  spec.mutable_model()->set_flavor("kimi-vl-a4b");
  EXPECT_EQ(ViolationOf(RequestOf(spec)).first, "spec.model.flavor");
  spec.mutable_model()->set_flavor("Debug_Kimi.VL");
  TrainingRunSpec resolved;
  EXPECT_TRUE(CheckCreateRequest(RequestOf(spec), &resolved).ok());
}

TEST(CheckCreateRequestTest, NamesEveryBadFieldAtOnce) {
  TrainingRunSpec spec = DigitsSpec();
  spec.mutable_pipeline()->set_microbatches(0);
  spec.mutable_optimizer()->set_learning_rate(-1);
  TrainingRunSpec resolved;
  const auto bad = GetDetail<google::rpc::BadRequest>(CheckCreateRequest(RequestOf(spec), &resolved));
  ASSERT_TRUE(bad.has_value());
  std::vector<std::string> fields;
  for (const auto& violation : bad->field_violations()) fields.push_back(violation.field());
  EXPECT_THAT(fields, testing::UnorderedElementsAre("spec.pipeline.microbatches", "spec.optimizer.learning_rate"));
}

class WatchTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(runs_.Create("digits", DigitsSpec(), "", false).ok());
    auto started = GrpcServer::Start({}, {{&control_, ClusterService::service_full_name()}});
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
    stub_ = ClusterService::NewStub(MakeChannel(server_->address()));
  }
  void Step(uint64_t step) {
    StepEvent event;
    event.set_step(step);
    runs_.PublishStep("digits", event);
  }
  void End() {
    runs_.Update("digits", [](TrainingRun& run) { run.set_state(TrainingRun::STATE_STOPPED); });
  }
  std::unique_ptr<grpc::ClientReader<WatchTrainingRunResponse>> Watch(grpc::ClientContext* context, uint64_t after_step) {
    WatchTrainingRunRequest request;
    request.set_name("trainingRuns/digits");
    request.set_after_step(after_step);
    SetDeadline(context, absl::Seconds(60));
    return stub_->WatchTrainingRun(context, request);
  }

  RunRegistry runs_{"/runs"};
  ControlService control_{&runs_};
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<ClusterService::Stub> stub_;
};

TEST_F(WatchTest, SendsWhatHappenedAfterTheStepThenWhatHappensAndEndsWithTheRun) {
  for (uint64_t step = 1; step <= 5; ++step) Step(step);
  grpc::ClientContext context;
  const auto reader = Watch(&context, 3);
  WatchTrainingRunResponse response;
  std::vector<uint64_t> steps;
  while (steps.size() < 2 && reader->Read(&response)) steps.push_back(response.step().step());
  EXPECT_THAT(steps, ElementsAre(4, 5));
  Step(6);
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.step().step(), 6u);
  End();
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.training_run().state(), TrainingRun::STATE_STOPPED);
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(WatchTest, LosesNothingWhileStepsComeFasterThanTheyAreRead) {
  constexpr uint64_t kSteps = 2000;
  grpc::ClientContext context;
  const auto reader = Watch(&context, 0);
  std::thread run([&] {
    for (uint64_t step = 1; step <= kSteps; ++step) Step(step);
    End();
  });
  WatchTrainingRunResponse response;
  uint64_t expected = 1;
  while (reader->Read(&response)) {
    if (response.has_step()) {
      ASSERT_EQ(response.step().step(), expected++);
    }
  }
  run.join();
  EXPECT_EQ(expected, kSteps + 1);
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(WatchTest, AWatcherThatLeavesIsForgotten) {
  {
    grpc::ClientContext context;
    const auto reader = Watch(&context, 0);
    Step(1);
    WatchTrainingRunResponse response;
    ASSERT_TRUE(reader->Read(&response));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  Step(2);
  server_->Shutdown(absl::Seconds(60));  // would wait for a reactor that is left
}

}  // namespace
}  // namespace moonpipe
