#include "services/coordinator/tensorboard.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <vector>

#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/comm/crc32c.h"
#include "moonpipe/tensorboard/v1/event.pb.h"

namespace moonpipe {
namespace {

using tensorboard::v1::Event;

std::string NewFolder(const std::string& name) {
  const std::string folder = ::testing::TempDir() + "/" + name;
  std::filesystem::remove_all(folder);
  return folder;
}

std::vector<std::string> FilesOf(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

// Takes a file apart by the format's own description; checks every checksum with arithmetic of its own.
std::vector<Event> Read(const std::string& path) {
  const std::string bytes = ReadFile(path).value();
  auto masked = [](const char* data, size_t size) {
    const uint32_t crc = Crc32c(data, size);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
  };
  std::vector<Event> events;
  size_t at = 0;
  while (at < bytes.size()) {
    uint64_t length = 0;
    uint32_t length_crc = 0, crc = 0;
    if (bytes.size() - at < 12) break;
    std::memcpy(&length, &bytes[at], 8);
    std::memcpy(&length_crc, &bytes[at + 8], 4);
    EXPECT_EQ(length_crc, masked(&bytes[at], 8));
    if (bytes.size() - at < 16 + length) break;
    std::memcpy(&crc, &bytes[at + 12 + length], 4);
    EXPECT_EQ(crc, masked(&bytes[at + 12], length));
    events.emplace_back();
    EXPECT_TRUE(events.back().ParseFromArray(&bytes[at + 12], static_cast<int>(length)));
    at += 16 + length;
  }
  EXPECT_EQ(at, bytes.size()) << "bytes are left over";
  return events;
}

cluster::v1::StepEvent StepSeven() {
  cluster::v1::StepEvent step;
  step.set_step(7);
  step.set_loss(1.5);
  step.set_grad_norm(0.25);
  step.set_learning_rate(1e-3);
  step.set_tokens(512);
  step.set_seconds(0.5);
  return step;
}

std::map<std::string, float> Values(const Event& event) {
  std::map<std::string, float> values;
  for (const auto& value : event.summary().value()) values[value.tag()] = value.simple_value();
  return values;
}

TEST(TensorBoardTest, ARecordIsLengthChecksumEventChecksum) {
  const std::string record = TensorBoardRecord("abc");
  ASSERT_EQ(record.size(), 8U + 4 + 3 + 4);
  EXPECT_EQ(record.substr(0, 8), std::string("\x03\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(record.substr(12, 3), "abc");
}

TEST(TensorBoardTest, AStepIsOneEventWithTheNumbersOfItsLine) {
  const std::string folder = NewFolder("events");
  {
    TensorBoardLog log(folder, 7, absl::FromUnixSeconds(1000));
    log.Append(StepSeven(), absl::FromUnixMillis(1001500));
  }
  ASSERT_EQ(FilesOf(folder).size(), 1U);
  EXPECT_NE(FilesOf(folder)[0].find("events.out.tfevents.1000."), std::string::npos);
  const std::vector<Event> events = Read(FilesOf(folder)[0]);
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(events[0].file_version(), "brain.Event:2");
  EXPECT_EQ(events[1].session_log().status(), tensorboard::v1::SessionLog::SESSION_STATUS_START);
  EXPECT_EQ(events[1].step(), 7);
  EXPECT_EQ(events[2].step(), 7);
  EXPECT_EQ(events[2].wall_time(), 1001.5);
  const auto values = Values(events[2]);
  EXPECT_EQ(values.at("train/loss"), 1.5F);
  EXPECT_EQ(values.at("train/grad_norm"), 0.25F);
  EXPECT_EQ(values.at("train/learning_rate"), 1e-3F);
  EXPECT_EQ(values.at("speed/tokens_per_second"), 1024.0F);
  EXPECT_FALSE(values.contains("speed/mfu")) << "the peak is not known";
}

TEST(TensorBoardTest, ASkippedStepHasNoLoss) {
  const std::string folder = NewFolder("skipped");
  {
    TensorBoardLog log(folder, 1, absl::FromUnixSeconds(1000));
    cluster::v1::StepEvent step = StepSeven();
    step.set_skip_reason("not_finite");
    step.set_mfu(0.5);
    log.Append(step, absl::FromUnixSeconds(1001));
  }
  const auto values = Values(Read(FilesOf(folder)[0]).back());
  EXPECT_FALSE(values.contains("train/loss"));
  EXPECT_FALSE(values.contains("train/grad_norm"));
  EXPECT_EQ(values.at("speed/mfu"), 0.5F);
}

TEST(TensorBoardTest, AStartWithinTheSameSecondGetsAFileOfItsOwn) {
  const std::string folder = NewFolder("starts");
  TensorBoardLog first(folder, 1, absl::FromUnixSeconds(1000));
  TensorBoardLog second(folder, 5, absl::FromUnixSeconds(1000));
  ASSERT_EQ(FilesOf(folder).size(), 2U);
  EXPECT_EQ(Read(FilesOf(folder)[1])[1].step(), 5);
}

}  // namespace
}  // namespace moonpipe
