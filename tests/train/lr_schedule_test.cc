#include "moonpipe/train/lr_schedule.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

using Schedule = cluster::v1::LearningRateSchedule;
using ::testing::AllOf;
using ::testing::HasSubstr;

Schedule Make(Schedule::Kind kind, uint64_t warmup, double floor) {
  Schedule schedule;
  schedule.set_kind(kind);
  schedule.set_warmup_steps(warmup);
  schedule.set_min_ratio(floor);
  return schedule;
}

TEST(LrScheduleTest, WarmUpRisesFromOnePartToThePeak) {
  for (Schedule::Kind kind : {Schedule::KIND_COSINE, Schedule::KIND_WSD, Schedule::KIND_CONSTANT}) {
    const Schedule schedule = Make(kind, 4, 0.1);
    EXPECT_DOUBLE_EQ(LearningRateFactor(schedule, 100, 0), 0.25);
    EXPECT_DOUBLE_EQ(LearningRateFactor(schedule, 100, 1), 0.5);
    EXPECT_DOUBLE_EQ(LearningRateFactor(schedule, 100, 3), 1);
    EXPECT_LE(LearningRateFactor(schedule, 100, 4), 1);
  }
}

TEST(LrScheduleTest, CosineFallsToTheFloorAtTheLastStep) {
  const Schedule schedule = Make(Schedule::KIND_COSINE, 2, 0.2);
  EXPECT_NEAR(LearningRateFactor(schedule, 12, 6), 0.2 + 0.8 * 0.5, 1e-15);
  EXPECT_NEAR(LearningRateFactor(schedule, 12, 11), 0.2, 1e-15);
  EXPECT_DOUBLE_EQ(LearningRateFactor(schedule, 12, 500), 0.2);
  for (uint64_t step = 2; step < 12; ++step) {
    EXPECT_LT(LearningRateFactor(schedule, 12, step), LearningRateFactor(schedule, 12, step - 1));
  }
}

TEST(LrScheduleTest, WsdIsStableThenFallsInALine) {
  Schedule schedule = Make(Schedule::KIND_WSD, 2, 0);
  schedule.set_decay_steps(4);
  EXPECT_DOUBLE_EQ(LearningRateFactor(schedule, 10, 5), 1);
  EXPECT_DOUBLE_EQ(LearningRateFactor(schedule, 10, 6), 0.75);
  EXPECT_DOUBLE_EQ(LearningRateFactor(schedule, 10, 8), 0.25);
  EXPECT_DOUBLE_EQ(LearningRateFactor(schedule, 10, 9), 0);
  schedule.clear_decay_steps();  // a fifth of the steps
  EXPECT_DOUBLE_EQ(LearningRateFactor(schedule, 10, 7), 1);
  EXPECT_DOUBLE_EQ(LearningRateFactor(schedule, 10, 8), 0.5);
}

TEST(LrScheduleTest, AbsentFieldsTakeTheirDefaults) {
  const Schedule schedule;
  EXPECT_NEAR(LearningRateFactor(schedule, 10, 9), 0.1, 1e-15);
  EXPECT_NEAR(LearningRateFactor(schedule, 10, 4), 0.1 + 0.9 * 0.5, 1e-15);
}

TEST(LrScheduleTest, ConstantStaysAtThePeak) {
  EXPECT_EQ(LearningRateFactor(Make(Schedule::KIND_CONSTANT, 0, 0.1), 10, 0), 1);
  EXPECT_EQ(LearningRateFactor(Make(Schedule::KIND_CONSTANT, 0, 0.1), 10, 99), 1);
}

TEST(LrScheduleTest, ImpossibleSchedulesAreRefusedWithBothNumbers) {
  EXPECT_TRUE(CheckLearningRateSchedule(Make(Schedule::KIND_COSINE, 3, 0.1), 10).ok());
  EXPECT_THAT(std::string(CheckLearningRateSchedule(Make(Schedule::KIND_COSINE, 11, 0.1), 10).message()),
              AllOf(HasSubstr("11"), HasSubstr("10")));
  EXPECT_FALSE(CheckLearningRateSchedule(Make(Schedule::KIND_COSINE, 0, 1.5), 10).ok());
  Schedule wsd = Make(Schedule::KIND_WSD, 6, 0.1);
  wsd.set_decay_steps(5);
  EXPECT_THAT(std::string(CheckLearningRateSchedule(wsd, 10).message()),
              AllOf(HasSubstr("6"), HasSubstr("5"), HasSubstr("10")));
}

}  // namespace
}  // namespace moonpipe
