#include "services/coordinator/journal.h"

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string NewPath() {
  const std::string path = absl::StrCat(testing::TempDir(), "/journal_", ::getpid(), ".jsonl");
  std::filesystem::remove(path);
  return path;
}

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

JournalEntry Entry(uint64_t step) {
  JournalEntry entry;
  entry.step = step;
  entry.generation = 3;
  entry.manifest_digest = std::string("\x00\xff\x10", 3) + std::to_string(step);
  entry.loss = 1.0 / 3;
  entry.grad_norm = 0.1 + static_cast<double>(step);
  entry.clip_factor = 0.25;
  entry.next_cursor.set_epoch(1);
  entry.next_cursor.set_window(2);
  entry.next_cursor.set_pack(step);
  return entry;
}

void ExpectEqual(const JournalEntry& a, const JournalEntry& b) {
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.generation, b.generation);
  EXPECT_EQ(a.manifest_digest, b.manifest_digest);
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(a.grad_norm, b.grad_norm);
  EXPECT_EQ(a.clip_factor, b.clip_factor);
  EXPECT_EQ(a.skip_reason, b.skip_reason);
  EXPECT_EQ(a.next_cursor.SerializeAsString(), b.next_cursor.SerializeAsString());
}

TEST(JournalTest, WhatIsAppendedIsThereAfterANewStart) {
  const std::string path = NewPath();
  {
    auto journal = Journal::Open(path);
    ASSERT_TRUE(journal.ok()) << journal.status();
    EXPECT_TRUE((*journal)->entries().empty());
    for (uint64_t step = 1; step <= 3; ++step) ASSERT_TRUE((*journal)->Append(Entry(step)).ok());
  }
  auto journal = Journal::Open(path);
  ASSERT_TRUE(journal.ok()) << journal.status();
  ASSERT_EQ((*journal)->entries().size(), 3U);
  for (uint64_t step = 1; step <= 3; ++step) ExpectEqual((*journal)->entries()[step - 1], Entry(step));
  EXPECT_EQ((*journal)->torn_bytes(), 0U);
}

TEST(JournalTest, EveryLineIsJson) {
  const std::string path = NewPath();
  {
    auto journal = Journal::Open(path);
    ASSERT_TRUE((*journal)->Append(Entry(1)).ok());
    ASSERT_TRUE((*journal)->Append(Entry(2)).ok());
  }
  std::ifstream lines(path);
  std::string line;
  uint64_t step = 0;
  while (std::getline(lines, line)) EXPECT_EQ(nlohmann::json::parse(line).at("entry").at("step"), ++step);
  EXPECT_EQ(step, 2U);
}

TEST(JournalTest, NumbersThatAreNotFiniteSurvive) {
  const std::string path = NewPath();
  JournalEntry entry = Entry(1);
  entry.loss = std::numeric_limits<double>::quiet_NaN();
  entry.grad_norm = std::numeric_limits<double>::infinity();
  entry.skip_reason = "not_finite";
  ASSERT_TRUE((*Journal::Open(path))->Append(entry).ok());
  auto journal = Journal::Open(path);
  ASSERT_EQ((*journal)->entries().size(), 1U);
  EXPECT_TRUE(std::isnan((*journal)->entries()[0].loss));
  EXPECT_EQ((*journal)->entries()[0].grad_norm, std::numeric_limits<double>::infinity());
  EXPECT_EQ((*journal)->entries()[0].skip_reason, "not_finite");
}

TEST(JournalTest, ALastLineTornAtAnyByteIsCutOffAndWritingGoesOn) {
  const std::string path = NewPath();
  {
    auto journal = Journal::Open(path);
    ASSERT_TRUE((*journal)->Append(Entry(1)).ok());
    ASSERT_TRUE((*journal)->Append(Entry(2)).ok());
  }
  const std::string bytes = *ReadFile(path);
  const size_t second = bytes.find('\n') + 1;
  for (size_t size = 0; size < bytes.size(); ++size) {
    WriteBytes(path, bytes.substr(0, size));
    {
      auto journal = Journal::Open(path);
      ASSERT_TRUE(journal.ok()) << journal.status() << " at byte " << size;
      const size_t whole = size < second ? 0 : 1;
      ASSERT_EQ((*journal)->entries().size(), whole) << "at byte " << size;
      EXPECT_EQ((*journal)->torn_bytes(), size - (whole == 0 ? 0 : second));
      if (size % 7 != 0) continue;  // each append waits for the disk
      ASSERT_TRUE((*journal)->Append(Entry(7)).ok());
    }
    auto journal = Journal::Open(path);
    ASSERT_TRUE(journal.ok()) << journal.status() << " at byte " << size;
    EXPECT_EQ((*journal)->torn_bytes(), 0U);
    ExpectEqual((*journal)->entries().back(), Entry(7));
  }
}

TEST(JournalTest, ALastLineWithAWrongByteIsCutOff) {
  const std::string path = NewPath();
  {
    auto journal = Journal::Open(path);
    ASSERT_TRUE((*journal)->Append(Entry(1)).ok());
    ASSERT_TRUE((*journal)->Append(Entry(2)).ok());
  }
  const std::string bytes = *ReadFile(path);
  for (size_t i = bytes.find('\n') + 1; i + 1 < bytes.size(); ++i) {
    std::string damaged = bytes;
    damaged[i] = damaged[i] == '5' ? '6' : '5';
    WriteBytes(path, damaged);
    auto journal = Journal::Open(path);
    ASSERT_TRUE(journal.ok()) << journal.status();
    EXPECT_EQ((*journal)->entries().size(), 1U) << "byte " << i;
  }
}

TEST(JournalTest, DamageBeforeTheLastLineIsAnErrorThatNamesTheLine) {
  const std::string path = NewPath();
  {
    auto journal = Journal::Open(path);
    for (uint64_t step = 1; step <= 3; ++step) ASSERT_TRUE((*journal)->Append(Entry(step)).ok());
  }
  std::string bytes = *ReadFile(path);
  bytes[bytes.find('\n') + 40] ^= 1;
  WriteBytes(path, bytes);
  const absl::Status status = Journal::Open(path).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path), HasSubstr("line 2")));
  EXPECT_EQ(*ReadFile(path), bytes);  // nothing was cut
}

TEST(JournalTest, ASecondCoordinatorIsRefused) {
  const std::string path = NewPath();
  auto first = Journal::Open(path);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(Journal::Open(path).status().code(), absl::StatusCode::kFailedPrecondition);
  first->reset();
  EXPECT_TRUE(Journal::Open(path).ok());
}

TEST(JournalTest, AStepThatIsTakenAgainMustBeMadeOfTheSameSamples) {
  auto journal = Journal::Open(NewPath());
  ASSERT_TRUE((*journal)->Append(Entry(1)).ok());
  JournalEntry again = Entry(1);
  again.loss = 7;
  ASSERT_TRUE((*journal)->Append(again).ok());
  EXPECT_EQ((*journal)->Find(1)->loss, 7);
  EXPECT_EQ((*journal)->Find(2), nullptr);
  EXPECT_TRUE((*journal)->CheckReplay(1, Entry(1).manifest_digest).ok());
  EXPECT_TRUE((*journal)->CheckReplay(2, "new").ok());
  const absl::Status status = (*journal)->CheckReplay(1, "\x01\x02");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("step 1"), HasSubstr("0102"), HasSubstr("00ff10")));
}

}  // namespace
}  // namespace moonpipe
