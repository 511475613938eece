#include "moonpipe/base/fault_point.h"

#include <signal.h>
#include <stdlib.h>

#include "gtest/gtest.h"
#include "moonpipe/base/logging.h"

namespace moonpipe {
namespace {

TEST(FaultPointTest, AFaultNamesServicePointStepMicrobatchAndAction) {
  const auto fault = ParseFault("decoder-stage-1:forward@3.2=stop");
  ASSERT_TRUE(fault.ok()) << fault.status();
  EXPECT_EQ(fault->service, "decoder-stage-1");
  EXPECT_EQ(fault->point, "forward");
  EXPECT_EQ(fault->step, 3u);
  EXPECT_EQ(fault->microbatch, 2);
  EXPECT_EQ(fault->action, Fault::Action::kStop);
  const auto any = ParseFault("coordinator:before_journal@5=kill-cluster");
  ASSERT_TRUE(any.ok()) << any.status();
  EXPECT_EQ(any->microbatch, -1);
  EXPECT_EQ(any->action, Fault::Action::kKillCluster);
}

TEST(FaultPointTest, WhatCannotBeParsedIsRefused) {
  for (const char* text : {"forward@3=kill", "a:forward=kill", "a:forward@x=kill", "a:forward@3=maim", "a:@3=kill", "a:b@1.2.3=kill",
                           "a:b@1.-2=kill", ":b@1=kill"}) {
    EXPECT_EQ(ParseFault(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

// Each in a process of its own: the variable is read once.
void Pass(const char* fault, const char* service) {
  setenv("MOONPIPE_FAULT", fault, 1);
  InitLogging(service, LogFormat::kText);
  bool failed = false;
  for (uint64_t step = 1; step <= 3; ++step) {
    for (int64_t microbatch = 0; microbatch < 2; ++microbatch) {
      failed = failed || !FaultPoint("forward", step, microbatch).ok();
      if (failed) _exit(10 + static_cast<int>(2 * step + static_cast<uint64_t>(microbatch)));
    }
  }
  _exit(0);
}

TEST(FaultPointDeathTest, ItHappensAtItsPlaceAndInItsServiceOnly) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(Pass("stage:forward@2.1=error", "stage"), testing::ExitedWithCode(15), "fault at forward of step 2 microbatch 1");
  EXPECT_EXIT(Pass("stage:forward@2=error", "stage"), testing::ExitedWithCode(14), "fault at forward");
  EXPECT_EXIT(Pass("stage:forward@2.1=kill", "stage"), testing::KilledBySignal(SIGKILL), "fault at forward");
  EXPECT_EXIT(Pass("stage:forward@2=error", "other"), testing::ExitedWithCode(0), "^$");
  EXPECT_EXIT(Pass("stage:backward@2=error", "stage"), testing::ExitedWithCode(0), "^$");
  EXPECT_EXIT(Pass("", "stage"), testing::ExitedWithCode(0), "^$");
  EXPECT_EXIT(Pass("stage:forward@2", "stage"), testing::ExitedWithCode(2), "is not of the form");
}

}  // namespace
}  // namespace moonpipe
