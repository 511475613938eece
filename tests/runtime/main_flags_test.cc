#include "moonpipe/runtime/main_flags.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/runtime/process_launcher.h"

namespace moonpipe {
namespace {

using testing::HasSubstr;

// Parses a command line; the error's text where it is refused.
std::string Parse(const std::string& line, ServiceFlags* flags,
                  ServiceFlags::Dials dials = ServiceFlags::Dials::kNobody) {
  CLI::App app("test");
  flags->AddTo(&app, dials);
  try {
    app.parse(line, false);
  } catch (const CLI::ParseError& error) {
    return error.what();
  }
  return "";
}

TEST(MainFlags, HaveSafeDefaults) {
  ServiceFlags flags;
  EXPECT_EQ(Parse("", &flags), "");
  EXPECT_EQ(flags.listen, "127.0.0.1:0");
  EXPECT_EQ(flags.metrics_listen, "127.0.0.1:0");
  EXPECT_EQ(flags.health_listen, "");
  EXPECT_FALSE(flags.insecure);
  EXPECT_EQ(flags.format(), LogFormat::kText);
}

TEST(MainFlags, AreRead) {
  ServiceFlags flags;
  EXPECT_EQ(
      Parse(
          "--coordinator c:1 --listen 0.0.0.0:2 --health-listen 0.0.0.0:3 --metrics-listen 0.0.0.0:4 --address-file /f "
          "--advertise-host pod --insecure --log-format json",
          &flags, ServiceFlags::Dials::kCoordinator),
      "");
  EXPECT_EQ(flags.coordinator, "c:1");
  EXPECT_EQ(flags.listen, "0.0.0.0:2");
  EXPECT_EQ(flags.health_listen, "0.0.0.0:3");
  EXPECT_EQ(flags.metrics_listen, "0.0.0.0:4");
  EXPECT_EQ(flags.address_file, "/f");
  EXPECT_TRUE(flags.insecure);
  EXPECT_EQ(flags.format(), LogFormat::kJson);
  EXPECT_EQ(flags.AdvertisedAddress("0.0.0.0:77").value(), "pod:77");
}

TEST(MainFlags, ComeFromTheEnvironmentToo) {
  ::setenv("MOONPIPE_COORDINATOR", "c:9", 1);
  ServiceFlags flags;
  EXPECT_EQ(Parse("", &flags, ServiceFlags::Dials::kCoordinator), "");
  ::unsetenv("MOONPIPE_COORDINATOR");
  EXPECT_EQ(flags.coordinator, "c:9");
}

TEST(MainFlags, RefuseWhatIsNoAddressOrIsMissing) {
  ServiceFlags flags;
  EXPECT_THAT(Parse("--listen nonsense", &flags), HasSubstr("--listen: \"nonsense\" is not an address"));
  EXPECT_THAT(Parse("--log-format xml", &flags), HasSubstr("xml"));
  EXPECT_THAT(Parse("", &flags, ServiceFlags::Dials::kCoordinator), HasSubstr("--coordinator is required"));
}

TEST(MainFlags, AWildcardIsNotAdvertised) {
  ServiceFlags flags;
  EXPECT_EQ(flags.AdvertisedAddress("127.0.0.1:5").value(), "127.0.0.1:5");
  EXPECT_THAT(flags.AdvertisedAddress("0.0.0.0:5").status().message(), HasSubstr("--advertise-host"));
}

TEST(MainFlags, TheAddressFileIsWritten) {
  ServiceFlags flags;
  EXPECT_TRUE(flags.WriteAddress("127.0.0.1:5").ok());
  flags.address_file = absl::StrCat(testing::TempDir(), "/address.", ::getpid());
  ASSERT_TRUE(flags.WriteAddress("127.0.0.1:5").ok());
  EXPECT_EQ(ReadFile(flags.address_file).value(), "127.0.0.1:5\n");
  std::remove(flags.address_file.c_str());
}

TEST(ShutdownSignal, IsWaitedFor) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string ready = absl::StrCat(testing::TempDir(), "/ready.", ::getpid());
    std::remove(ready.c_str());
    auto process = ChildProcess::Start({.name = "probe", .arguments = {PROBE_BINARY, "wait-for-signal", ready}});
    ASSERT_TRUE(process.ok()) << process.status();
    ASSERT_TRUE(WaitForAddress(process->get(), ready, absl::Seconds(20)).ok());
    (*process)->Signal(signal);
    const auto exit = (*process)->Wait(absl::Now() + absl::Seconds(20));
    ASSERT_TRUE(exit.ok()) << exit.status();
    EXPECT_EQ(exit->ToString(), "exited with code 5");
    std::remove(ready.c_str());
  }
}

// What the probe's static initialisers saw.
std::string Environment(const std::string& prefix) {
  const std::string log = absl::StrCat(testing::TempDir(), "/environment.", ::getpid());
  std::remove(log.c_str());
  auto process = ChildProcess::Start(
      {.name = "probe",
       .arguments = {"/bin/sh", "-c",
                     absl::StrCat("echo $$; ", prefix, " exec ", PROBE_BINARY, " print-environment 'a b' c")},
       .log_file = log});
  EXPECT_TRUE(process.ok()) << process.status();
  EXPECT_TRUE((*process)->Wait(absl::Now() + absl::Seconds(20))->ok());
  const std::string text = (*process)->LogTail();
  std::remove(log.c_str());
  const std::string pid = absl::StrCat((*process)->pid());
  EXPECT_THAT(text, testing::AllOf(testing::StartsWith(pid + "\n"), testing::EndsWith(" " + pid + " a b c")))
      << "same process, same arguments";
  const size_t begin = pid.size() + 1;
  return text.substr(begin, text.find(" " + pid, begin) - begin);
}

TEST(DeterministicEnvironment, IsThereBeforeStaticInitialisersRun) {
  EXPECT_EQ(Environment("unset MKL_CBWR ATEN_CPU_CAPABILITY;"), "AVX2 avx2");
}

TEST(DeterministicEnvironment, YieldsToWhatIsSet) {
  EXPECT_EQ(Environment("unset ATEN_CPU_CAPABILITY; export MKL_CBWR=COMPATIBLE;"), "COMPATIBLE avx2");
  EXPECT_EQ(Environment("export ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE;"), "COMPATIBLE default");
}

}  // namespace
}  // namespace moonpipe
