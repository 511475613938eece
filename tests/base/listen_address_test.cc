#include "moonpipe/base/listen_address.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

using testing::HasSubstr;

TEST(ListenAddress, SplitsHostAndPort) {
  EXPECT_EQ(ParseHostPort("127.0.0.1:7070")->host, "127.0.0.1");
  EXPECT_EQ(ParseHostPort("127.0.0.1:7070")->port, 7070);
  EXPECT_EQ(ParseHostPort("[::1]:0")->host, "::1");
  EXPECT_EQ(ParseHostPort("stage-0.stages:9")->host, "stage-0.stages");
  EXPECT_EQ(FormatHostPort("::1", 5), "[::1]:5");
  EXPECT_EQ(FormatHostPort("a", 5), "a:5");
}

TEST(ListenAddress, RefusesWhatIsNoAddress) {
  for (const char* bad :
       {"", "host", ":80", "host:", "host:65536", "host:-1", "host:+1", "host:x", "::1:80", "[]:80"}) {
    EXPECT_EQ(ParseHostPort(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(ListenAddress, KnowsLoopback) {
  for (const char* inside : {"127.0.0.1:0", "127.1.2.3:5", "localhost:5", "[::1]:5", "unix:/run/x"})
    EXPECT_TRUE(IsLoopback(inside)) << inside;
  for (const char* outside : {"0.0.0.0:5", "[::]:5", "10.0.0.1:5", "127.example.org:5", "host:5", "127.0.0.1"}) {
    EXPECT_FALSE(IsLoopback(outside)) << outside;
  }
}

TEST(ListenAddress, PlainTextBeyondLoopbackMustBeAskedFor) {
  EXPECT_TRUE(CheckPlainTextAllowed("127.0.0.1:5", false, "--listen").ok());
  EXPECT_TRUE(CheckPlainTextAllowed("0.0.0.0:5", true, "--listen").ok());
  EXPECT_THAT(CheckPlainTextAllowed("0.0.0.0:5", false, "--listen").message(),
              HasSubstr("--listen 0.0.0.0:5 would serve plain text"));
}

}  // namespace
}  // namespace moonpipe
