#include "moonpipe/data/sample_reader.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/data/file_patterns.h"
#include "moonpipe/data/skip.h"
#include "tests/data/testing_files.h"

namespace moonpipe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::unique_ptr<SampleReader> Open(const std::vector<std::string>& shards, SampleReaderOptions options = {}) {
  auto reader = SampleReader::Open(shards, std::move(options));
  EXPECT_TRUE(reader.ok()) << reader.status();
  return *std::move(reader);
}

TEST(ExpandFilePatterns, ExpandsBracesAndShellPatterns) {
  const std::string folder = MakeFolder("patterns");
  for (const char* name : {"t-08.tar", "t-09.tar", "t-10.tar", "u.tar", "v.tar"}) {
    ASSERT_TRUE(WriteFileAtomically(folder + "/" + name, "x").ok());
  }
  const auto names = [&](const std::vector<std::string>& patterns) {
    std::vector<std::string> full, found;
    for (const std::string& pattern : patterns) full.push_back(folder + "/" + pattern);
    const auto files = ExpandFilePatterns(full);
    EXPECT_TRUE(files.ok()) << files.status();
    for (const std::string& file : *files) found.push_back(file.substr(folder.size() + 1));
    return found;
  };
  EXPECT_THAT(names({"t-{08..10}.tar"}), ElementsAre("t-08.tar", "t-09.tar", "t-10.tar"));
  EXPECT_THAT(names({"{v,u}.tar"}), ElementsAre("u.tar", "v.tar"));
  EXPECT_THAT(names({"v.tar", "t-?8.tar", "t-*.tar"}), ElementsAre("v.tar", "t-08.tar", "t-08.tar", "t-09.tar", "t-10.tar"));
}

TEST(ExpandFilePatterns, NamesWhatIsMissing) {
  const std::string folder = MakeFolder("patterns_missing");
  ASSERT_TRUE(WriteFileAtomically(folder + "/t-0.tar", "x").ok());
  const absl::Status missing = ExpandFilePatterns({folder + "/t-{0..1}.tar"}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(missing.message(), HasSubstr("t-1.tar, which"));
  EXPECT_EQ(ExpandFilePatterns({folder + "/*.zip"}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ExpandFilePatterns({}).status().code(), absl::StatusCode::kNotFound);
  for (const char* ill : {"/{3..1}", "/{a..b}", "/{1", "/{0..99999999999}"}) {
    EXPECT_EQ(ExpandFilePatterns({folder + ill}).status().code(), absl::StatusCode::kInvalidArgument) << ill;
  }
}

TEST(SampleReader, GivesAnySampleByItsGlobalIndex) {
  const std::string folder = MakeFolder("reader");
  const std::string one = WriteTar(folder + "/1.tar", {{"a.0.png", "picture a"}, {"a.json", RecordJson("<image>A", "x", {"a.0.png"})},
                                                       {"b.json", RecordJson("B", "x")}});
  const std::string two = WriteTar(folder + "/2.tar", {{"./sub/a.json", RecordJson("<image><image>C", "x", {"p.png", "sub/a.q.png"})},
                                                       {"sub/p.png", "picture p"}, {"sub/a.q.png", "picture q"}});
  const auto reader = Open({one, two});
  EXPECT_EQ(reader->size(), 3u) << "sub/p.png is no sample of its own";
  EXPECT_EQ(reader->Key(2), "sub/a");
  const auto third = reader->Read(2);
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_THAT(third->pictures, ElementsAre("picture p", "picture q"));
  EXPECT_EQ(reader->Read(1)->record.turns[0].parts[0].text, "B");
  EXPECT_THAT(reader->Read(0)->pictures, ElementsAre("picture a"));
  EXPECT_EQ(reader->Read(3).status().code(), absl::StatusCode::kOutOfRange);
}

TEST(SampleReader, ReadsTheTarsOfPythonWithLongAndForeignNames) {
  // Written by Python's tarfile: pax (names beyond ASCII and beyond 100 bytes), GNU, and ustar with a prefix.
  const std::string longest = std::string(60, 'd') + "/" + std::string(70, 'k');
  for (const char* name : {"pax.tar", "gnu.tar", "ustar.tar"}) {
    const auto reader = Open({absl::StrCat(TEST_DATA_DIR, "/data/golden/", name)});
    ASSERT_EQ(reader->size(), 2u) << name;
    EXPECT_EQ(reader->Key(0), longest);
    EXPECT_EQ(reader->Key(1), std::string(name) == "ustar.tar" ? "plain" : "字");
    for (uint64_t i = 0; i < 2; ++i) EXPECT_TRUE(reader->Read(i).ok()) << reader->Read(i).status();
  }
}

TEST(SampleReader, SkipsWithAReasonAndNeverGivesANeighbour) {
  const std::string folder = MakeFolder("reasons");
  const std::string shard = WriteTar(
      folder + "/s.tar", {{"a.json", "{"}, {"b.json", "{}"}, {"c.json", RecordJson("<image>", "x", {"none.png"})}, {"d.png", "no record"},
                          {"e.json", RecordJson("<image>", "x", {"http://example.com/a.png"})}, {"f.json", "{}"}, {"f.json", "{}"},
                          {"g.json", RecordJson("<image>", "x", {"data:image/png;base64,!"})}, {"h.json", RecordJson("good", "x")}});
  const auto reader = Open({shard});
  const std::vector<std::string> reasons = {"bad_json", "bad_record", "missing_picture", "bad_record", "bad_record", "bad_record"};
  ASSERT_EQ(reader->size(), 7u);
  for (size_t i = 0; i < reasons.size(); ++i) EXPECT_EQ(SkipReason(reader->Read(i).status()), reasons[i]) << reader->Key(i) << reader->Read(i).status();
  EXPECT_TRUE(reader->Read(6).ok());
}

TEST(SampleReader, ReadsFilesBesideTheShardButNoneOutsideTheFolder) {
  const std::string folder = MakeFolder("paths");
  std::filesystem::create_directories(folder + "/data/pictures");
  ASSERT_TRUE(WriteFileAtomically(folder + "/data/pictures/in.png", "inside").ok());
  ASSERT_TRUE(WriteFileAtomically(folder + "/out.png", "outside").ok());
  std::filesystem::create_symlink(folder + "/out.png", folder + "/data/link.png");
  const auto record = [](const std::string& name) { return RecordJson("<image>", "x", {name}); };
  const std::string shard = WriteTar(folder + "/data/s.tar", {{"a.json", record("pictures/in.png")},
                                                              {"b.json", record("pictures/../pictures/in.png")},
                                                              {"c.json", record("../out.png")},
                                                              {"d.json", record(folder + "/out.png")},
                                                              {"e.json", record("link.png")},
                                                              {"f.json", record("pictures")}});
  const auto strict = Open({shard});
  EXPECT_THAT(strict->Read(0)->pictures, ElementsAre("inside"));
  EXPECT_THAT(strict->Read(1)->pictures, ElementsAre("inside"));
  for (uint64_t i = 2; i < 5; ++i) {
    EXPECT_EQ(SkipReason(strict->Read(i).status()), "bad_record") << i;
    EXPECT_THAT(strict->Read(i).status().message(), HasSubstr("outside the data folder"));
  }
  EXPECT_EQ(SkipReason(strict->Read(5).status()), "missing_picture") << "a folder is no picture";
  SampleReaderOptions allowing;
  allowing.allow_outside_paths = true;
  const auto open = Open({shard}, allowing);
  for (uint64_t i = 2; i < 5; ++i) EXPECT_THAT(open->Read(i)->pictures, ElementsAre("outside"));
}

TEST(SampleReader, RefusesAShardThatWasCutOffOrIsNoTar) {
  const std::string folder = MakeFolder("cut");
  const std::string tar = TarBytes({{"a.json", std::string(1000, ' ')}});
  for (const auto& [bytes, detail] : std::vector<std::pair<std::string, std::string>>{
           {tar.substr(0, 900), "has 1000 bytes, and 388 are left"}, {tar.substr(0, 300), "ends inside the header"}, {std::string(600, 'x'), "checksum"}}) {
    ASSERT_TRUE(WriteFileAtomically(folder + "/s.tar", bytes).ok());
    const absl::Status status = SampleReader::Open({folder + "/s.tar"}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(status.message(), testing::AllOf(HasSubstr("s.tar"), HasSubstr(detail)));
  }
  EXPECT_EQ(SampleReader::Open({WriteTar(folder + "/empty.tar", {})}).status().code(), absl::StatusCode::kInvalidArgument);
}

// Refuses a number of reads after the index was read.
class FlakyFile : public RandomAccessFile {
 public:
  FlakyFile(std::unique_ptr<RandomAccessFile> file, int* failures) : file_(std::move(file)), failures_(failures) {}
  absl::StatusOr<std::string> Read(uint64_t offset, uint64_t size) const override {
    if (*failures_ > 0) {
      --*failures_;
      return absl::UnavailableError("the disk is busy");
    }
    return file_->Read(offset, size);
  }
  uint64_t size() const override { return file_->size(); }

 private:
  std::unique_ptr<RandomAccessFile> file_;
  int* failures_;
};

TEST(SampleReader, TriesARefusedReadAgainAndThenFailsInsteadOfSkipping) {
  const std::string shard = WriteTar(MakeFolder("flaky") + "/s.tar", {{"a.json", RecordJson("A", "x")}});
  int failures = 0;
  SampleReaderOptions options;
  options.open = [&](const std::string& path) -> absl::StatusOr<std::unique_ptr<RandomAccessFile>> {
    auto file = OpenRandomAccessFile(path);
    if (!file.ok()) return file.status();
    return std::make_unique<FlakyFile>(*std::move(file), &failures);
  };
  const auto reader = Open({shard}, options);
  failures = 2;
  EXPECT_TRUE(reader->Read(0).ok());
  failures = 3;
  const absl::Status status = reader->Read(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(SkipReason(status), std::nullopt);
  EXPECT_THAT(status.message(), testing::AllOf(HasSubstr("sample 0 (a of"), HasSubstr("3 times: the disk is busy")));
}

}  // namespace
}  // namespace moonpipe
