#include "moonpipe/base/file.h"

#include "gtest/gtest.h"

namespace moonpipe {
namespace {

TEST(File, WritesAndReadsBack) {
  const std::string path = testing::TempDir() + "/file_test_bytes";
  ASSERT_TRUE(WriteFileAtomically(path, "first").ok());
  ASSERT_TRUE(WriteFileAtomically(path, "second").ok());
  EXPECT_EQ(*ReadFile(path), "second");
  EXPECT_EQ(*Sha256HexOfFile(path), Sha256Hex("second"));
}

TEST(File, AMissingFileIsNotFoundWithItsPath) {
  const auto bytes = ReadFile("/nowhere/at/all");
  EXPECT_EQ(bytes.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(bytes.status().message().find("/nowhere/at/all"), std::string::npos);
}

TEST(File, Sha256IsThePublishedOne) {
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace moonpipe
