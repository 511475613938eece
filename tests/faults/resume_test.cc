// A run that is killed without warning and started again ends as if nothing had been: weights, optimizer state and metrics bit by bit.
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/faults/faulty_run.h"

namespace moonpipe {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// The undisturbed run, made once.
struct Reference {
  std::string run_file;
  std::string run_folder;
  absl::Duration duration;
};
const Reference& TheReference() {
  static const Reference* reference = [] {
    auto* made = new Reference;
    const std::string folder = FreshFolder("reference");
    made->run_file = WriteRun(folder);
    made->run_folder = folder + "/the-run";
    const absl::Time begin = absl::Now();
    const auto program = Program::Moonpipe(Train(made->run_file, made->run_folder));
    EXPECT_EQ(program->Wait().ToString(), "exited with code 0") << program->err();
    made->duration = absl::Now() - begin;
    EXPECT_EQ(MetricsOf(made->run_folder).size(), kSteps);
    return made;
  }();
  return *reference;
}

std::string CopyOfReference(const std::string& name) {
  const std::string folder = FreshFolder(name) + "/the-run";
  fs::copy(TheReference().run_folder, folder, fs::copy_options::recursive);
  return folder;
}

// Starts the run again and expects it to end well.
void GoOn(const std::string& run_folder, std::vector<std::string> more = {}) {
  const auto program = Program::Moonpipe(Train(TheReference().run_file, run_folder, std::move(more)));
  ASSERT_EQ(program->Wait().ToString(), "exited with code 0") << program->err() << LogOf(run_folder, "coordinator");
}

struct KillCase {
  const char* name;
  const char* fault;
  uint64_t resumes_from;  // 0: from the beginning
};

class KillPointTest : public testing::TestWithParam<KillCase> {};

TEST_P(KillPointTest, ARunKilledHereEndsLikeAnUndisturbedOne) {
  const KillCase& kill_case = GetParam();
  const std::string run_folder = FreshFolder(kill_case.name) + "/the-run";
  const auto killed =
      Program::Moonpipe(Train(TheReference().run_file, run_folder), absl::StrCat(kill_case.fault, "=kill-cluster"));
  EXPECT_EQ(killed->Wait().signal, SIGKILL) << killed->out() << killed->err();
  ASSERT_TRUE(AwaitFault(run_folder, *killed)) << "the fault did not come";
  EXPECT_TRUE(AllGone(run_folder));
  GoOn(run_folder);
  EXPECT_THAT(LogOf(run_folder, "coordinator"),
              HasSubstr(kill_case.resumes_from == 0
                            ? "there is no complete checkpoint in"
                            : absl::StrCat("step ", kill_case.resumes_from, " is the newest complete checkpoint")));
  ExpectSameEnd(TheReference().run_folder, run_folder);
}

INSTANTIATE_TEST_SUITE_P(
    Points, KillPointTest,
    testing::Values(KillCase{"BeforeRunStep", "coordinator:before_run_step@5", 3},
                    KillCase{"AfterRunStep", "coordinator:after_run_step@5", 3},
                    KillCase{"AfterTheLastReport", "coordinator:before_journal@5", 3},
                    KillCase{"AfterTheJournal", "coordinator:after_journal@5", 3},
                    KillCase{"AfterTheCommitWasSent", "coordinator:after_commit@5", 3},
                    KillCase{"InForward", "decoder-stage-1:forward@5.1", 3},
                    KillCase{"InBackward", "vision-encoder:backward@5", 3},
                    KillCase{"BeforeOneWorkerCommits", "decoder-stage-0:commit@5", 3},
                    KillCase{"WhileAStepIsMade", "dataloader:make_step@5", 3},
                    KillCase{"InTheFirstShardOfTheFirstCheckpoint", "decoder-stage-0:shard_half@1", 0},
                    KillCase{"InAShardOfTheSecondCheckpoint", "decoder-stage-1:shard_half@3", 3},
                    KillCase{"InTheOptimizerShardOfTheSecondCheckpoint", "vision-encoder:shard_half@4", 3},
                    KillCase{"BeforeTheManifest", "coordinator:before_manifest@6", 3},
                    KillCase{"BeforeTheRename", "coordinator:before_rename@6", 3},
                    KillCase{"AfterTheRename", "coordinator:after_rename@6", 6},
                    KillCase{"AfterTheLastRename", "coordinator:after_rename@8", 8}),
    [](const auto& kill_case) { return std::string(kill_case.param.name); });

// Kills the launcher at a random time; the kernel ends its services with it.
void KillAtRandomTimes(uint32_t seed, int kills) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> part(0.05, 0.95);
  for (int i = 0; i < kills; ++i) {
    const absl::Duration until = part(random) * TheReference().duration;
    SCOPED_TRACE(absl::StrCat("kill ", i, " after ", absl::FormatDuration(until)));
    const std::string run_folder = FreshFolder(absl::StrCat("random-", seed, "-", i)) + "/the-run";
    const auto killed = Program::Moonpipe(Train(TheReference().run_file, run_folder));
    (void)killed->Wait(until);
    // A service whose libraries are still being loaded notices only in its main that the launcher is gone.
    ASSERT_TRUE(AllGone(run_folder, absl::Seconds(20)));
    GoOn(run_folder);
    ExpectSameEnd(TheReference().run_folder, run_folder);
  }
}

TEST(RandomKillTest, FourRandomKillsChangeNothing) { KillAtRandomTimes(17, 4); }
TEST(RandomKillTest, DISABLED_TwentyRandomKillsChangeNothing) { KillAtRandomTimes(18, 20); }

TEST(ResumeTest, AFinishedRunSaysSoAndDoesNothing) {
  const std::string run_folder = CopyOfReference("finished");
  const auto again = Program::Moonpipe(Train(TheReference().run_file, run_folder));
  EXPECT_EQ(again->Wait().ToString(), "exited with code 0") << again->err();
  EXPECT_THAT(again->out(), HasSubstr("has finished: 8 of 8 steps are taken"));
  EXPECT_EQ(MetricsOf(run_folder).size(), kSteps);
}

TEST(ResumeTest, ARaisedNumberOfStepsGoesOn) {
  const std::string run_folder = CopyOfReference("raised");
  GoOn(run_folder, {"--set", "train.steps=9"});
  EXPECT_EQ(MetricsOf(run_folder).back().at("step"), 9);
}

TEST(ResumeTest, TornAndTruncatedCheckpointsAreNeverChosen) {
  const std::string run_folder = CopyOfReference("torn");
  // Newer than all others, but never finished: no manifest, and a name that says so.
  fs::copy(CheckpointOf(run_folder, 8), CheckpointOf(run_folder, 9) + ".writing");
  fs::copy(CheckpointOf(run_folder, 8), CheckpointOf(run_folder, 7));
  fs::remove(CheckpointOf(run_folder, 7) + "/moonpipe.manifest.json");
  // The last one has lost the end of a shard; that before it a single bit.
  const std::string shard = CheckpointOf(run_folder, 8) + "/model-00001-of-00003.safetensors";
  ASSERT_TRUE(fs::exists(shard));
  fs::resize_file(shard, fs::file_size(shard) - 1);
  const std::string flipped = CheckpointOf(run_folder, 6) + "/optimizer-00002-of-00003.safetensors";
  {
    std::fstream file(flipped, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const char last = static_cast<char>(file.get() ^ 1);
    file.seekp(-1, std::ios::end);
    file.put(last);
  }
  // Named ones are refused, with the reason.
  for (const uint64_t step : {6, 7, 8}) {
    const auto refused = Program::Moonpipe(Train(TheReference().run_file, run_folder, {"--resume", absl::StrCat(step)}));
    EXPECT_EQ(refused->Wait().exit_code, 1);
    EXPECT_THAT(refused->err(), HasSubstr(absl::StrCat("step-0000000", step)));
  }
  EXPECT_FALSE(fs::exists(CheckpointOf(run_folder, 9) + ".writing")) << "it is removed at the next start";
  GoOn(run_folder);
  EXPECT_THAT(LogOf(run_folder, "coordinator"), HasSubstr("step 3 is the newest complete checkpoint; passed over: "));
  ExpectSameEnd(TheReference().run_folder, run_folder);
}

TEST(ResumeTest, OnlyTheLastCheckpointsAreKept) {
  EXPECT_THAT(CheckpointsOf(TheReference().run_folder), ElementsAre(3, 6, 8));
  const std::string run_folder = FreshFolder("keep") + "/the-run";
  GoOn(run_folder, {"--set", "checkpoint.keep_last=2"});
  EXPECT_THAT(CheckpointsOf(run_folder), ElementsAre(6, 8));
}

TEST(ResumeTest, NeverBeginsAfreshAndItsCheckpointsTakeThePlaceOfTheOld) {
  const std::string run_folder = CopyOfReference("never");
  // Another learning rate: an old checkpoint could be told from a new one.
  const std::vector<std::string> other = {"--set", "optimizer.learning_rate=1e-3"};
  const auto killed = Program::Moonpipe(
      Train(TheReference().run_file, run_folder, {"--resume", "never", "--set", "optimizer.learning_rate=1e-3"}),
      "coordinator:before_run_step@5=kill-cluster");
  ASSERT_EQ(killed->Wait().signal, SIGKILL) << killed->err();
  ASSERT_TRUE(AllGone(run_folder));
  EXPECT_EQ(MetricsOf(run_folder).size(), kSteps + 4);
  EXPECT_THAT(CheckpointsOf(run_folder), ElementsAre(3)) << "checkpoints of the abandoned run would be taken up by auto";
  GoOn(run_folder, other);
  EXPECT_EQ(MetricsOf(run_folder).size(), kSteps + 4 + 5);
}

TEST(ResumeTest, AStepOfTheRunIsTakenUp) {
  const std::string run_folder = CopyOfReference("step");
  GoOn(run_folder, {"--resume", "3"});
  EXPECT_THAT(LogOf(run_folder, "coordinator"), HasSubstr("checkpoint.resume is 3"));
  EXPECT_EQ(MetricsOf(run_folder).size(), kSteps + 5);
  ExpectSameEnd(TheReference().run_folder, run_folder);
  const auto missing = Program::Moonpipe(Train(TheReference().run_file, run_folder, {"--resume", "5"}));
  EXPECT_EQ(missing->Wait().exit_code, 1);
  EXPECT_THAT(missing->err(), HasSubstr("there is no folder"));
}

TEST(ResumeTest, ACheckpointOfAnotherFolderIsTakenUp) {
  const std::string run_folder = FreshFolder("path") + "/the-run";
  GoOn(run_folder, {"--resume", CheckpointOf(TheReference().run_folder, 3)});
  EXPECT_EQ(MetricsOf(run_folder).front().at("step"), 4);
  ExpectSameEnd(TheReference().run_folder, run_folder);
}

TEST(ResumeTest, AnotherNumberOfStagesGoesOnWithTheSameSamplesAndBits) {
  for (const char* stages : {"1", "3"}) {
    const std::string run_folder = FreshFolder(absl::StrCat("stages-", stages)) + "/the-run";
    GoOn(run_folder, {"--resume", CheckpointOf(TheReference().run_folder, 3), "--set", absl::StrCat("pipeline.stages=", stages)});
    EXPECT_EQ(MetricsOf(run_folder).front().at("step"), 4);
    ExpectSameMetrics(TheReference().run_folder, run_folder);
    EXPECT_TRUE(TensorsOf(CheckpointOf(run_folder, kSteps)) == TensorsOf(CheckpointOf(TheReference().run_folder, kSteps)))
        << "weights or moments differ on " << stages << " stages";
  }
}

TEST(ResumeTest, ARunInUseIsLeftAlone) {
  const std::string run_folder = FreshFolder("in-use") + "/the-run";
  const auto first = Program::Moonpipe(Train(TheReference().run_file, run_folder), "coordinator:before_rename@3=hold");
  ASSERT_TRUE(AwaitFault(run_folder, *first)) << first->err();
  const auto second = Program::Moonpipe(Train(TheReference().run_file, run_folder));
  EXPECT_EQ(second->Wait().exit_code, 1);
  EXPECT_THAT(second->err(), HasSubstr("in use by another coordinator"));
  EXPECT_EQ(first->Wait().ToString(), "exited with code 0") << first->err();
  ExpectSameEnd(TheReference().run_folder, run_folder);
}

}  // namespace
}  // namespace moonpipe
