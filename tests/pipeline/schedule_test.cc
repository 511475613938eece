#include "moonpipe/pipeline/schedule.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Schedule Make(const ScheduleOptions& options) {
  auto schedule = MakeSchedule(options);
  EXPECT_TRUE(schedule.ok()) << schedule.status();
  return *schedule;
}

void ExpectInvalid(const absl::Status& status, const ::testing::Matcher<std::string>& message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), message);
}

// The place of an action in a worker's list; fails the test if it is not there.
size_t PlaceOf(const WorkerActions& worker, const std::string& text) {
  const Action action = *ParseAction(text);
  const auto found = std::find(worker.actions.begin(), worker.actions.end(), action);
  EXPECT_TRUE(found != worker.actions.end()) << text;
  return static_cast<size_t>(found - worker.actions.begin());
}

int32_t PeakLiveForwards(const WorkerActions& worker, int32_t chunk) {
  int32_t live = 0;
  int32_t peak = 0;
  for (const Action& action : worker.actions) {
    if (action.chunk != chunk) continue;
    if (action.type == ActionType::kForward) peak = std::max(peak, ++live);
    if (action.type == ActionType::kBackward) --live;
  }
  EXPECT_EQ(live, 0);
  return peak;
}

TEST(ActionTest, TextAndActionAreTheSameThing) {
  for (const char* text : {"0F0", "12B7", "VF3", "VB0", "0SA1", "1RA1", "1SG15", "0RG0", "VSF2", "0RF2", "0SH2", "VRH2",
                           "0RT", "3RP", "VRP"}) {
    auto action = ParseAction(text);
    ASSERT_TRUE(action.ok()) << action.status();
    EXPECT_EQ(action->ToString(), text);
  }
}

TEST(ActionTest, TextThatIsNoActionIsRefusedWithTheText) {
  for (const char* text : {"", "F", "0", "0F", "F0", "-1F0", "0F-1", "0X0", "00F0", "0F00", "0F0 ", "0RP0", "0RT1",
                           "vF0", "VV0", "0F99999999999"}) {
    ExpectInvalid(ParseAction(text).status(), HasSubstr(absl::StrCat("\"", text, "\"")));
  }
}

TEST(ScheduleTest, OneStageWithTheTowerInItAlternates) {
  EXPECT_EQ(Make({.stages = 1, .microbatches = 2, .vision_in_first_stage = true}).ToString(),
            "VF0 0F0 0B0 VB0 VF1 0F1 0B1 VB1 0RP\n");
}

TEST(ScheduleTest, TheTowerCountsAsAStageAheadOfTheFirst) {
  EXPECT_EQ(Make({.stages = 2, .microbatches = 3, .tied_embeddings = true}).ToString(),
            "VF0 VSF0 VF1 VSF1 VF2 VSF2 VRH0 VB0 VRH1 VB1 VRH2 VB2 VRP\n"
            "0RF0 0F0 0SA0 0RF1 0F1 0SA1 0RG0 0B0 0RF2 0SH0 0F2 0SA2 0RG1 0B1 0SH1 0RG2 0B2 0SH2 0RT 0RP\n"
            "1RA0 1F0 1B0 1RA1 1SG0 1F1 1B1 1RA2 1SG1 1F2 1B2 1SG2 1RT 1RP\n");
}

TEST(ScheduleTest, GpipeRunsAllForwardsFirst) {
  EXPECT_EQ(Make({.name = "gpipe", .stages = 2, .microbatches = 2, .has_vision = false}).ToString(),
            "0F0 0SA0 0F1 0SA1 0RG0 0B0 0RG1 0B1 0RP\n"
            "1RA0 1F0 1RA1 1F1 1B0 1SG0 1B1 1SG1 1RP\n");
}

TEST(ScheduleTest, DecodingOnlyGoesForward) {
  EXPECT_EQ(Make({.stages = 2, .microbatches = 2, .tied_embeddings = true, .forward_only = true}).ToString(),
            "VF0 VSF0 VF1 VSF1 VRP\n"
            "0RF0 0F0 0SA0 0RF1 0F1 0SA1 0RP\n"
            "1RA0 1F0 1RA1 1F1 1RP\n");
}

TEST(ScheduleTest, EveryScheduleIsCompleteFreeOfDeadlockAndHoldsNoMoreThanItMust) {
  int schedules = 0;
  for (const char* name : {"1f1b", "gpipe"}) {
    for (int32_t stages = 1; stages <= 8; ++stages) {
      for (int32_t microbatches = 1; microbatches <= 16; ++microbatches) {
        for (int flags = 0; flags < 16; ++flags) {
          ScheduleOptions options{
              name, stages, microbatches, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0};
          const Schedule schedule = Make(options);
          const absl::Status valid = ValidateSchedule(schedule);
          ASSERT_TRUE(valid.ok()) << valid << "\n" << schedule.ToString();
          ++schedules;
          if (options.forward_only || options.name != "1f1b") continue;
          const int32_t positions = static_cast<int32_t>(schedule.workers.size());
          for (int32_t r = 0; r < positions; ++r) {
            for (int32_t chunk : schedule.workers[static_cast<size_t>(r)].chunks) {
              ASSERT_EQ(PeakLiveForwards(schedule.workers[static_cast<size_t>(r)], chunk),
                        std::min(microbatches, positions - r))
                  << schedule.ToString();
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(schedules, 2 * 8 * 16 * 16);
}

TEST(ScheduleTest, TheTowerInTheFirstStageStandsRightBesideItsForwardsAndBackwards) {
  const Schedule schedule = Make({.stages = 4, .microbatches = 8, .vision_in_first_stage = true});
  for (int32_t m = 0; m < 8; ++m) {
    EXPECT_EQ(PlaceOf(schedule.workers[0], absl::StrCat("VF", m)) + 1,
              PlaceOf(schedule.workers[0], absl::StrCat("0F", m)));
    EXPECT_EQ(PlaceOf(schedule.workers[0], absl::StrCat("0B", m)) + 1,
              PlaceOf(schedule.workers[0], absl::StrCat("VB", m)));
  }
}

TEST(ScheduleTest, UnknownNamesAndImpossibleNumbersAreRefused) {
  ExpectInvalid(MakeSchedule({.name = "1f1bb"}).status(),
                AllOf(HasSubstr("1f1bb"), HasSubstr("1f1b, gpipe"), HasSubstr("did you mean 1f1b?")));
  ExpectInvalid(MakeSchedule({.stages = 0}).status(), HasSubstr("not 0 and 1"));
  ExpectInvalid(MakeSchedule({.microbatches = -3}).status(), HasSubstr("not 1 and -3"));
}

// --- the validator ---

void Remove(WorkerActions& worker, const std::string& text) {
  worker.actions.erase(worker.actions.begin() + static_cast<std::ptrdiff_t>(PlaceOf(worker, text)));
}
void Insert(WorkerActions& worker, size_t place, const std::string& text) {
  worker.actions.insert(worker.actions.begin() + static_cast<std::ptrdiff_t>(place), *ParseAction(text));
}
void Swap(WorkerActions& worker, const std::string& a, const std::string& b) {
  std::swap(worker.actions[PlaceOf(worker, a)], worker.actions[PlaceOf(worker, b)]);
}

TEST(ValidatorTest, NamesTheWorkerAndTheActionThatIsMissingDoubleOrForeign) {
  const Schedule good = Make({.stages = 2, .microbatches = 3});
  Schedule bad = good;
  Remove(bad.workers[2], "1B1");
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("worker 2: 1B1 is missing"));
  bad = good;
  Insert(bad.workers[1], 3, "0F2");
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("worker 1: 0F2 stands twice"));
  bad = good;
  Insert(bad.workers[0], 2, "VF3");
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("worker 0: VF3 does not belong"));
  bad = good;
  Insert(bad.workers[2], 2, "1SA0");
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("worker 2: 1SA0 does not belong"));
  bad = good;
  bad.workers.pop_back();
  ExpectInvalid(ValidateSchedule(bad), AllOf(HasSubstr("2 workers"), HasSubstr("need 3")));
  bad = good;
  bad.workers[1].chunks = {1};
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("worker 1: owns the chunks 1, expected 0"));
}

TEST(ValidatorTest, NamesWhatStandsBeforeWhatItNeeds) {
  const Schedule good = Make({.stages = 2, .microbatches = 3, .tied_embeddings = true});
  Schedule bad = good;
  Swap(bad.workers[1], "0F0", "0SA0");
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("worker 1: 0SA0 stands before 0F0"));
  bad = good;
  Swap(bad.workers[2], "1RP", "1RT");
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("worker 2: 1RP stands before 1RT"));
  bad = good;
  Swap(bad.workers[1], "0RT", "0B2");
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("worker 1:"));
  const Schedule inside = Make({.stages = 1, .microbatches = 2, .vision_in_first_stage = true});
  bad = inside;
  Swap(bad.workers[0], "VF0", "0F0");
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("worker 0: 0F0 stands before VF0"));
}

TEST(ValidatorTest, BackwardsOutOfOrderAreRefusedBecauseTheyChangeTheSum) {
  Schedule bad = Make({.name = "gpipe", .stages = 1, .microbatches = 2, .has_vision = false});
  Swap(bad.workers[0], "0B0", "0B1");
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("worker 0: 0B1 stands before 0B0"));
}

TEST(ValidatorTest, MessagesMustMeetInOneOrderOnBothEnds) {
  Schedule bad = Make({.name = "gpipe", .stages = 2, .microbatches = 2, .has_vision = false});
  Swap(bad.workers[1], "1RA0", "1RA1");
  Swap(bad.workers[1], "1F0", "1F1");
  ExpectInvalid(ValidateSchedule(bad), HasSubstr("0SA0 meets 1RA1 of worker 1"));
}

TEST(ValidatorTest, TheUsualOrderOfSendingTheGradientFirstIsADeadlockWithoutBuffers) {
  Schedule bad = Make({.stages = 2, .microbatches = 3, .has_vision = false});
  Swap(bad.workers[1], "1SG0", "1RA1");
  ExpectInvalid(ValidateSchedule(bad),
                AllOf(HasSubstr("deadlock"), HasSubstr("worker 0 at 0SA1"), HasSubstr("worker 1 at 1SG0")));
}

}  // namespace
}  // namespace moonpipe
