#include "moonpipe/runtime/process_launcher.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"

namespace moonpipe {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(20);

class Launcher : public testing::Test {
 protected:
  void SetUp() override {
    std::string folder = testing::TempDir() + "/launcher.XXXXXX";
    ASSERT_NE(::mkdtemp(folder.data()), nullptr);
    folder_ = folder;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<ChildProcess> Shell(const std::string& script, const std::string& log = "log") {
    auto process = ChildProcess::Start(
        {.name = "child", .arguments = {"/bin/sh", "-c", script, "sh", folder_}, .log_file = folder_ + "/" + log});
    EXPECT_TRUE(process.ok()) << process.status();
    return std::move(*process);
  }

  std::string folder_;
};

TEST_F(Launcher, ReportsTheExitCode) {
  const auto exit = Shell("exit 3")->Wait(absl::Now() + kLong);
  ASSERT_TRUE(exit.ok()) << exit.status();
  EXPECT_EQ(exit->exit_code, 3);
  EXPECT_FALSE(exit->ok());
  EXPECT_EQ(exit->ToString(), "exited with code 3");
}

TEST_F(Launcher, ReportsTheSignal) {
  const auto process = Shell("kill -9 $$");
  const auto exit = process->Wait(absl::Now() + kLong);
  ASSERT_TRUE(exit.ok()) << exit.status();
  EXPECT_EQ(exit->signal, SIGKILL);
  EXPECT_EQ(exit->ToString(), "was killed by signal 9 (Killed)");
  EXPECT_FALSE(process->running());
}

TEST_F(Launcher, AMissingProgramIsNotFound) {
  const auto process = ChildProcess::Start({.name = "decoder-0", .arguments = {"/no/such/program"}});
  EXPECT_EQ(process.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(process.status().message(), HasSubstr("cannot start decoder-0 (/no/such/program)"));
  EXPECT_EQ(ChildProcess::Start({.name = "x"}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(Launcher, AddsToTheEnvironment) {
  ::setenv("MOONPIPE_TEST_KEPT", "kept", 1);
  ::setenv("MOONPIPE_TEST_REPLACED", "old", 1);
  auto process = ChildProcess::Start(
      {.name = "child",
       .arguments = {"sh", "-c", "echo $MOONPIPE_TEST_KEPT $MOONPIPE_TEST_REPLACED $MOONPIPE_PARENT_PID"},
       .environment = {{"MOONPIPE_TEST_REPLACED", "new"}},
       .log_file = folder_ + "/log"});
  ASSERT_TRUE(process.ok()) << process.status();
  ASSERT_TRUE((*process)->Wait(absl::Now() + kLong).ok());
  EXPECT_EQ((*process)->LogTail(), absl::StrCat("kept new ", ::getpid()));
}

TEST_F(Launcher, LogsBothOutputsAndAppends) {
  ASSERT_TRUE(Shell("echo one; echo two >&2")->Wait(absl::Now() + kLong).ok());
  const auto process = Shell("echo three");
  ASSERT_TRUE(process->Wait(absl::Now() + kLong).ok());
  EXPECT_EQ(process->LogTail(), "one\ntwo\nthree");
  EXPECT_EQ(process->LogTail(2), "two\nthree");
}

TEST_F(Launcher, CallsBackWhenTheProcessEnds) {
  const auto process = Shell("exit 4");
  absl::Notification called;
  int code = -1;
  process->OnExit([&](const ProcessExit& exit) {
    code = exit.exit_code;
    called.Notify();
  });
  ASSERT_TRUE(called.WaitForNotificationWithTimeout(kLong));
  EXPECT_EQ(code, 4);
  bool again = false;
  process->OnExit([&](const ProcessExit& exit) { again = exit.exit_code == 4; });
  EXPECT_TRUE(again);
}

TEST_F(Launcher, WaitsForTheAddress) {
  const auto process = Shell("echo 127.0.0.1:4321 > $1/tmp && mv $1/tmp $1/address && exec sleep 100");
  const auto address = WaitForAddress(process.get(), folder_ + "/address", kLong);
  ASSERT_TRUE(address.ok()) << address.status();
  EXPECT_EQ(*address, "127.0.0.1:4321");
}

TEST_F(Launcher, AChildThatDiesBeforeItIsReadyIsReportedWithItsLog) {
  const auto process = Shell("echo 'cannot read config.json' >&2; exit 7");
  const auto address = WaitForAddress(process.get(), folder_ + "/address", kLong);
  EXPECT_EQ(address.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(address.status().message(),
            absl::StrCat("child exited with code 7 before it was ready; the end of its log ", folder_,
                         "/log:\ncannot read config.json"));
}

TEST_F(Launcher, AChildThatIsNeverReadyIsReportedAtTheDeadline) {
  const auto process = Shell("exec sleep 100");
  const auto address = WaitForAddress(process.get(), folder_ + "/address", absl::Milliseconds(30));
  EXPECT_EQ(address.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(address.status().message(), HasSubstr("child was not ready within 30ms; its log"));
}

TEST_F(Launcher, TerminatesWithGraceAndThenKills) {
  const auto polite = Shell("trap 'exit 0' TERM; echo > $1/polite; while :; do sleep 0.01; done", "polite.log");
  const auto stubborn = Shell("trap '' TERM; echo > $1/stubborn; while :; do sleep 0.01; done", "stubborn.log");
  ASSERT_TRUE(WaitForAddress(polite.get(), folder_ + "/polite", kLong).ok());
  ASSERT_TRUE(WaitForAddress(stubborn.get(), folder_ + "/stubborn", kLong).ok());
  EXPECT_EQ(TerminateAll({polite.get(), stubborn.get()}, absl::Seconds(2)).size(), 1u);
  EXPECT_TRUE(polite->Wait(absl::Now())->ok());
  EXPECT_EQ(stubborn->Wait(absl::Now())->signal, SIGKILL);
}

TEST_F(Launcher, TheDestructorKills) {
  auto process = Shell("exec sleep 100");
  const pid_t pid = process->pid();
  process.reset();
  EXPECT_EQ(::kill(pid, 0), -1);
}

TEST_F(Launcher, ASignalAfterTheEndDoesNothing) {
  const auto process = Shell("exit 0");
  ASSERT_TRUE(process->Wait(absl::Now() + kLong).ok());
  process->Signal(SIGKILL);
  EXPECT_TRUE(process->Wait(absl::Now())->ok());
}

TEST_F(Launcher, AServiceDiesWithItsParent) {
  // A shell stands between as the parent that is killed; it starts the probe in the background and says its number.
  const auto parent = Shell(absl::StrCat("MOONPIPE_PARENT_PID=$$ ", PROBE_BINARY,
                                         " die-with-parent $1/child & echo $! > $1/tmp; mv $1/tmp $1/pid; wait"));
  const auto pid_text = WaitForAddress(parent.get(), folder_ + "/pid", kLong);
  ASSERT_TRUE(pid_text.ok()) << pid_text.status();
  ASSERT_TRUE(WaitForAddress(parent.get(), folder_ + "/child", kLong).ok());
  const pid_t child = std::atoi(pid_text->c_str());
  ASSERT_EQ(::kill(child, 0), 0);
  parent->Signal(SIGKILL);
  const absl::Time deadline = absl::Now() + kLong;
  // The child is now nobody's; it is gone when its number is, or it waits as a zombie for the first process of the
  // system.
  const auto gone = [&] {
    const auto stat = ReadFile(absl::StrCat("/proc/", child, "/stat"));
    return !stat.ok() || stat->find(") Z ") != std::string::npos || stat->find(") X ") != std::string::npos;
  };
  while (!gone() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(2));
  EXPECT_TRUE(gone());
}

}  // namespace
}  // namespace moonpipe
