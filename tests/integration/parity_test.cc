// `moonpipe parity`: recordings of the reference implementations through the services, on any number of stages.
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/parity_runs.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<std::string> kVlCases = {"packed", "text_only", "two_images"};

TEST(ParityCommandTest, KimiVlAgreesOnTwoStages) { ExpectAgreement("kimi_vl_a3b", kVlCases, {"--stages", "2"}); }
TEST(ParityCommandTest, KimiVlAgreesOnFourStagesWithTwoMicrobatches) {
  // One command a case: six processes on a busy machine take their time.
  for (const std::string& name : kVlCases) ExpectAgreement("kimi_vl_a3b", {name}, {"--case", name, "--stages", "4", "--microbatches", "2"});
}
TEST(ParityCommandTest, MoonlightAgreesOnOneStageWithTwoMicrobatches) {
  ExpectAgreement("moonlight", {"packed", "padded"}, {"--stages", "1", "--microbatches", "2", "--schedule", "gpipe"});
}
TEST(ParityCommandTest, NumbersThatDoNotFitAreRefusedWithBoth) {
  const ProgramResult stages = RunParity(FixtureFolder("moonlight"), {"--stages", "5"});
  EXPECT_EQ(stages.exit_code, 1);
  EXPECT_THAT(stages.err, AllOf(HasSubstr("--stages 5"), HasSubstr("4 decoder layers")));
  const ProgramResult microbatches = RunParity(FixtureFolder("moonlight"), {"--microbatches", "3"});
  EXPECT_EQ(microbatches.exit_code, 1);
  EXPECT_THAT(microbatches.err, AllOf(HasSubstr("3 microbatches"), HasSubstr("2 rows")));
  EXPECT_THAT(RunParity(FixtureFolder("moonlight"), {"--case", "video"}).err, AllOf(HasSubstr("video"), HasSubstr("packed, padded")));
}

}  // namespace
}  // namespace moonpipe
