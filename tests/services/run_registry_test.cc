#include "services/coordinator/run_registry.h"

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/runtime/rpc_error.h"

namespace moonpipe {
namespace {

using cluster::v1::Checkpoint;
using cluster::v1::StepEvent;
using cluster::v1::TrainingRun;
using cluster::v1::TrainingRunSpec;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kName[] = "trainingRuns/digits";

TrainingRunSpec SpecOf(uint64_t steps) {
  TrainingRunSpec spec;
  spec.mutable_train()->set_steps(steps);
  return spec;
}

class RunRegistryTest : public testing::Test {
 protected:
  void Start(uint64_t steps = 100) {
    ASSERT_TRUE(runs_.Create("digits", SpecOf(steps), "", false).ok());
    ASSERT_EQ(runs_.WaitForJob(absl::Now())->id, "digits");
    SetState(TrainingRun::STATE_RUNNING);
  }
  void SetState(TrainingRun::State state) {
    runs_.Update("digits", [&](TrainingRun& run) { run.set_state(state); });
  }
  void Step(uint64_t step) {
    StepEvent event;
    event.set_step(step);
    runs_.PublishStep("digits", event);
  }
  std::string ReasonOf(RunCommand command) { return ErrorReason(runs_.Command(kName, command, "").status()); }

  RunRegistry runs_{"/runs"};
};

TEST(CheckCommandTest, EachStateTakesTheCommandsThatMakeSenseInIt) {
  const struct {
    TrainingRun::State state;
    std::vector<bool> pause_resume_stop_save;
  } cases[] = {
      {TrainingRun::STATE_PENDING, {false, false, true, false}},   {TrainingRun::STATE_STARTING, {false, false, true, false}},
      {TrainingRun::STATE_RUNNING, {true, false, true, true}},     {TrainingRun::STATE_PAUSED, {false, true, true, true}},
      {TrainingRun::STATE_EVALUATING, {false, false, true, false}}, {TrainingRun::STATE_STOPPED, {false, false, false, false}},
      {TrainingRun::STATE_SUCCEEDED, {false, false, false, false}}, {TrainingRun::STATE_FAILED, {false, false, false, false}},
  };
  for (const auto& c : cases) {
    std::vector<bool> allowed;
    for (const RunCommand command : {RunCommand::kPause, RunCommand::kResume, RunCommand::kStop, RunCommand::kSave}) {
      const absl::Status status = CheckCommand(c.state, command);
      allowed.push_back(status.ok());
      if (status.ok()) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_EQ(ErrorReason(status), "WRONG_STATE");
    }
    EXPECT_EQ(allowed, c.pause_resume_stop_save) << TrainingRun::State_Name(c.state);
  }
  EXPECT_THAT(std::string(CheckCommand(TrainingRun::STATE_PAUSED, RunCommand::kPause).message()),
              HasSubstr("a run that is PAUSED cannot be paused"));
}

TEST_F(RunRegistryTest, ARunThatIsStillPausingCanBeResumed) {
  Start();
  EXPECT_EQ(ReasonOf(RunCommand::kResume), "WRONG_STATE");
  ASSERT_EQ(ReasonOf(RunCommand::kPause), "");
  EXPECT_EQ(ReasonOf(RunCommand::kResume), "");
  EXPECT_FALSE(runs_.TakeWishes("digits", 0).pause);
}

TEST_F(RunRegistryTest, CreateGivesPlaceAndFolderAndRefusesASecondActiveRun) {
  const auto created = runs_.Create("digits", SpecOf(5), "", false);
  ASSERT_TRUE(created.ok());
  EXPECT_EQ(created->name(), kName);
  EXPECT_EQ(created->folder(), "/runs/digits");
  EXPECT_EQ(created->state(), TrainingRun::STATE_PENDING);
  EXPECT_EQ(ErrorReason(runs_.Create("digits", SpecOf(5), "", false).status()), "RUN_ALREADY_EXISTS");
  const absl::Status second = runs_.Create("other", SpecOf(5), "", false).status();
  EXPECT_EQ(ErrorReason(second), "ANOTHER_RUN_ACTIVE");
  EXPECT_EQ(GetDetail<google::rpc::PreconditionFailure>(second)->violations(0).subject(), kName);
  SetState(TrainingRun::STATE_STOPPED);
  EXPECT_TRUE(runs_.Create("other", SpecOf(5), "", false).ok());
  EXPECT_EQ(runs_.List().front().name(), "trainingRuns/other") << "newest first";
}

TEST_F(RunRegistryTest, ARepeatedCreateIsTheFirstOne) {
  const auto first = runs_.Create("digits", SpecOf(5), "id-1", false);
  const auto again = runs_.Create("digits", SpecOf(5), "id-1", false);
  ASSERT_TRUE(first.ok() && again.ok());
  EXPECT_EQ(first->uid(), again->uid());
  EXPECT_EQ(runs_.List().size(), 1u);
  EXPECT_EQ(ErrorReason(runs_.Create("digits", SpecOf(6), "id-1", false).status()), "REQUEST_ID_REUSED");
  EXPECT_EQ(ErrorReason(runs_.Create("digits", SpecOf(5), "id-2", false).status()), "RUN_ALREADY_EXISTS");
}

TEST_F(RunRegistryTest, ValidateOnlyCreatesNothing) {
  const auto checked = runs_.Create("digits", SpecOf(5), "", false, /*validate_only=*/true);
  ASSERT_TRUE(checked.ok());
  EXPECT_EQ(checked->uid(), "");
  EXPECT_TRUE(runs_.List().empty());
  ASSERT_TRUE(runs_.Create("digits", SpecOf(5), "", false).ok());
  EXPECT_EQ(ErrorReason(runs_.Create("digits", SpecOf(5), "", false, true).status()), "RUN_ALREADY_EXISTS");
}

TEST_F(RunRegistryTest, AStaleEtagChangesNothing) {
  Start();
  const std::string etag = runs_.Get(kName)->etag();
  Step(1);
  const absl::Status stale = runs_.Command(kName, RunCommand::kPause, etag).status();
  EXPECT_EQ(stale.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ErrorReason(stale), "STALE_ETAG");
  EXPECT_FALSE(runs_.TakeWishes("digits", 1).pause);
  EXPECT_TRUE(runs_.Command(kName, RunCommand::kPause, runs_.Get(kName)->etag()).ok());
  EXPECT_TRUE(runs_.TakeWishes("digits", 1).pause);
}

TEST_F(RunRegistryTest, ASaveIsAnnouncedForTheStepInProgressAndTakenThereBeforeAPauseOrAStop) {
  Start();
  Step(4);
  const auto announced = runs_.RequestSave(kName);
  ASSERT_TRUE(announced.ok());
  EXPECT_EQ(announced->name(), "trainingRuns/digits/checkpoints/step-00000005");
  EXPECT_EQ(announced->state(), Checkpoint::STATE_SAVING);
  ASSERT_EQ(ReasonOf(RunCommand::kPause), "");
  ASSERT_EQ(ReasonOf(RunCommand::kStop), "");
  // The boundary before the step in progress: nothing is to be done yet.
  RunRegistry::Wishes wishes = runs_.TakeWishes("digits", 4);
  EXPECT_FALSE(wishes.save || wishes.pause || wishes.stop);
  wishes = runs_.TakeWishes("digits", 5);
  EXPECT_TRUE(wishes.save && wishes.pause && wishes.stop);
  EXPECT_FALSE(runs_.TakeWishes("digits", 5).save) << "taken once";
}

TEST_F(RunRegistryTest, APausedRunAndOneAtItsLastStepSaveWhereTheyStand) {
  Start(/*steps=*/6);
  Step(5);
  SetState(TrainingRun::STATE_PAUSED);
  EXPECT_EQ(runs_.RequestSave(kName)->step(), 5u);
  EXPECT_TRUE(runs_.TakeWishes("digits", 5).save);
  SetState(TrainingRun::STATE_RUNNING);
  Step(6);
  EXPECT_EQ(runs_.RequestSave(kName)->step(), 6u);
}

TEST_F(RunRegistryTest, ARepeatedSaveIsTheFirstOne) {
  Start();
  Step(4);
  ASSERT_EQ(runs_.RequestSave(kName, "id-1")->step(), 5u);
  Step(5);
  EXPECT_EQ(runs_.RequestSave(kName, "id-1")->step(), 5u);
  EXPECT_EQ(runs_.RequestSave(kName, "id-2")->step(), 6u);
}

TEST_F(RunRegistryTest, ACheckpointThatIsThereIsNotWrittenAgain) {
  Start();
  Step(4);
  SetState(TrainingRun::STATE_PAUSED);
  Checkpoint ready;
  ready.set_name("trainingRuns/digits/checkpoints/step-00000004");
  ready.set_state(Checkpoint::STATE_READY);
  runs_.PutCheckpoint("digits", ready);
  EXPECT_EQ(runs_.RequestSave(kName)->state(), Checkpoint::STATE_READY);
  EXPECT_FALSE(runs_.TakeWishes("digits", 4).save);
}

TEST_F(RunRegistryTest, ASaveThatTheEndOfTheRunOvertookHasFailedAndSaysWhy) {
  Start();
  const std::string name = runs_.RequestSave(kName)->name();
  runs_.Update("digits", [](TrainingRun& run) {
    run.set_state(TrainingRun::STATE_FAILED);
    run.set_error("decoder stage 1 is gone");
  });
  const auto checkpoint = runs_.GetCheckpoint(name);
  ASSERT_TRUE(checkpoint.ok());
  EXPECT_EQ(checkpoint->state(), Checkpoint::STATE_FAILED);
  EXPECT_EQ(checkpoint->error(), "the run ended before it was written: decoder stage 1 is gone");
}

TEST_F(RunRegistryTest, CheckpointsAreListedNewestFirstUntilTheyAreForgotten) {
  Start();
  for (const int step : {2, 10, 4}) {
    Checkpoint checkpoint;
    checkpoint.set_name("trainingRuns/digits/checkpoints/step-000000" + std::string(step < 10 ? "0" : "") + std::to_string(step));
    checkpoint.set_step(static_cast<uint64_t>(step));
    runs_.PutCheckpoint("digits", checkpoint);
  }
  runs_.ForgetCheckpoint("digits", "trainingRuns/digits/checkpoints/step-00000004");
  std::vector<uint64_t> steps;
  const auto listed = runs_.ListCheckpoints(kName);
  for (const Checkpoint& checkpoint : *listed) steps.push_back(checkpoint.step());
  EXPECT_THAT(steps, ElementsAre(10, 2));
  EXPECT_EQ(ErrorReason(runs_.GetCheckpoint("trainingRuns/digits/checkpoints/step-00000004").status()), "CHECKPOINT_NOT_FOUND");
}

TEST_F(RunRegistryTest, WhatIsNotThereIsNamed) {
  const absl::Status missing = runs_.Get("trainingRuns/nothing").status();
  EXPECT_EQ(ErrorReason(missing), "RUN_NOT_FOUND");
  EXPECT_EQ(GetDetail<google::rpc::ResourceInfo>(missing)->resource_name(), "trainingRuns/nothing");
  EXPECT_EQ(ErrorReason(runs_.Get("nothing").status()), "RUN_NOT_FOUND") << "a name has its collection";
  EXPECT_EQ(ErrorReason(runs_.RequestSave("trainingRuns/nothing").status()), "RUN_NOT_FOUND");
  EXPECT_EQ(ErrorReason(runs_.EventAt("trainingRuns/nothing", 0).status()), "RUN_NOT_FOUND");
}

TEST_F(RunRegistryTest, EventsComeInOrderAndListenersHearOfEach) {
  int heard = 0;
  const uint64_t handle = runs_.AddListener([&] { ++heard; });
  Start();
  Step(1);
  EXPECT_EQ(heard, 2);
  runs_.RemoveListener(handle);
  SetState(TrainingRun::STATE_SUCCEEDED);
  EXPECT_EQ(heard, 2);
  EXPECT_EQ(runs_.EventAt(kName, 0)->event->training_run().state(), TrainingRun::STATE_RUNNING);
  EXPECT_EQ(runs_.EventAt(kName, 1)->event->step().step(), 1u);
  EXPECT_EQ(runs_.EventAt(kName, 2)->event->training_run().state(), TrainingRun::STATE_SUCCEEDED);
  EXPECT_EQ(runs_.EventAt(kName, 3)->event, nullptr);
  EXPECT_TRUE(runs_.EventAt(kName, 3)->ended);
}

}  // namespace
}  // namespace moonpipe
