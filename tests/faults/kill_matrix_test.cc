// Every process of a run, killed and stopped in forward, backward and save: the run ends soon, with one message that says where to
// look and what to do, leaves no process behind, and goes on afterwards.
#include <signal.h>

#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/faults/faulty_run.h"

namespace moonpipe {
namespace {

using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// The longest time from the fault to the end of `moonpipe train`.
constexpr absl::Duration kLimit = absl::Seconds(15);

enum class Phase { kForward, kBackward, kSave };
enum class Deed { kKill, kStop };

struct MatrixCase {
  const char* service;  // the victim
  Phase phase;
  Deed deed;
};

std::string PhaseName(Phase phase) {
  return phase == Phase::kForward ? "forward" : phase == Phase::kBackward ? "backward" : "save";
}

bool Computes(const std::string& service) { return service != "coordinator" && service != "dataloader"; }

class KillMatrixTest : public testing::TestWithParam<MatrixCase> {};

TEST_P(KillMatrixTest, TheRunEndsInTimeWithOneMessageAndGoesOnAfterwards) {
  const MatrixCase& matrix_case = GetParam();
  const std::string victim = matrix_case.service;
  const std::string folder = FreshFolder(absl::StrCat(victim, "-", PhaseName(matrix_case.phase), matrix_case.deed == Deed::kKill));
  const std::string run_file = WriteRun(folder);
  const std::string run_folder = folder + "/the-run";
  // A computing service does it itself; while others are hit, a stage is held at the place, since they do no such work.
  const std::string place = matrix_case.phase == Phase::kSave ? "save@3" : PhaseName(matrix_case.phase) + "@4.1";
  const std::string deed = matrix_case.deed == Deed::kKill ? "kill" : "stop";
  std::string fault;
  bool by_signal = false;
  if (Computes(victim)) {
    fault = absl::StrCat(victim, ":", place, "=", deed);
  } else if (victim == "dataloader" && matrix_case.phase == Phase::kForward) {
    fault = absl::StrCat("dataloader:make_step@4=", deed);
  } else {
    fault = absl::StrCat("decoder-stage-1:", place, "=hold");
    by_signal = true;
  }
  const auto program = Program::Moonpipe(Train(run_file, run_folder), fault);
  ASSERT_TRUE(AwaitFault(run_folder, *program)) << program->err() << LogOf(run_folder, "coordinator");
  const absl::Time begin = absl::Now();
  if (by_signal) {
    const auto services = ServicesOf(run_folder);
    ASSERT_TRUE(services.contains(victim)) << "the victim does not run";
    ::kill(services.at(victim), matrix_case.deed == Deed::kKill ? SIGKILL : SIGSTOP);
  }
  EXPECT_EQ(program->Wait().ToString(), "exited with code 1") << program->err();
  const absl::Duration took = absl::Now() - begin;
  EXPECT_LT(took, kLimit);
  EXPECT_TRUE(AllGone(run_folder, absl::Seconds(1)));
  const std::string message = program->err();
  std::cout << "measured: " << victim << " " << PhaseName(matrix_case.phase) << " " << deed << " ended after "
            << absl::FormatDuration(absl::Trunc(took, absl::Milliseconds(1))) << ": " << message;

  // One message, and in it the service, where it happened, and what to do.
  EXPECT_THAT(message, testing::StartsWith("moonpipe: "));
  EXPECT_EQ(message.find("moonpipe: ", 1), std::string::npos) << message;
  const std::map<std::string, std::string> in_words = {{"coordinator", "coordinator"},
                                                       {"dataloader", "dataloader"},
                                                       {"vision-encoder", "vision encoder"},
                                                       {"decoder-stage-0", "decoder stage 0"},
                                                       {"decoder-stage-1", "decoder stage 1"}};
  EXPECT_THAT(message, testing::StartsWith(absl::StrCat("moonpipe: ", in_words.at(victim)))) << "it does not blame the victim";
  EXPECT_THAT(message, HasSubstr("--run-folder " + run_folder));
  // A dataloader that works ahead may be missed only a step later.
  EXPECT_THAT(message, ContainsRegex("step [345]"));
  if (Computes(victim) && matrix_case.phase != Phase::kSave) {
    EXPECT_THAT(message, ContainsRegex("edge (features|feature-gradient|activation.0|gradient.0)"));
    EXPECT_THAT(message, ContainsRegex("(microbatch|microbatches) [0-2]"));
  }

  const auto again = Program::Moonpipe(Train(run_file, run_folder));
  EXPECT_EQ(again->Wait().ToString(), "exited with code 0") << again->err();
  EXPECT_EQ(MetricsOf(run_folder).back().at("step"), kSteps);
}

std::string NameOf(const testing::TestParamInfo<MatrixCase>& info) {
  std::string name;
  for (const auto word : absl::StrSplit(absl::StrCat(info.param.service, "-", PhaseName(info.param.phase), "-",
                                                     info.param.deed == Deed::kKill ? "killed" : "stopped"),
                                        '-')) {
    absl::StrAppend(&name, std::string(1, static_cast<char>(std::toupper(word[0]))), word.substr(1));
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Some, KillMatrixTest,
                         testing::Values(MatrixCase{"vision-encoder", Phase::kForward, Deed::kKill},
                                         MatrixCase{"decoder-stage-1", Phase::kForward, Deed::kStop},
                                         MatrixCase{"decoder-stage-0", Phase::kBackward, Deed::kKill},
                                         MatrixCase{"dataloader", Phase::kForward, Deed::kKill},
                                         MatrixCase{"coordinator", Phase::kForward, Deed::kKill},
                                         MatrixCase{"coordinator", Phase::kSave, Deed::kStop}),
                         NameOf);

std::vector<MatrixCase> Whole() {
  std::vector<MatrixCase> cases;
  for (const char* service : {"coordinator", "dataloader", "vision-encoder", "decoder-stage-0", "decoder-stage-1"}) {
    for (const Phase phase : {Phase::kForward, Phase::kBackward, Phase::kSave}) {
      for (const Deed deed : {Deed::kKill, Deed::kStop}) cases.push_back({service, phase, deed});
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(DISABLED_Whole, KillMatrixTest, testing::ValuesIn(Whole()), NameOf);

}  // namespace
}  // namespace moonpipe
