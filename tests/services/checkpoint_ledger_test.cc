#include "services/coordinator/checkpoint_ledger.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/spec/safetensors.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

class CheckpointLedgerTest : public testing::Test {
 protected:
  CheckpointLedgerTest() {
    run_ = absl::StrCat(testing::TempDir(), "/ledger_", ::getpid(), "_",
                        testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(run_);
    fs::create_directories(run_);
    tokenizer_ = run_ + "/tiktoken.model";
    WriteBytes(tokenizer_, "merges");
  }
  ~CheckpointLedgerTest() override { fs::remove_all(run_); }

  CheckpointLedger Open() {
    auto ledger = CheckpointLedger::Open(run_);
    EXPECT_TRUE(ledger.ok()) << ledger.status();
    return *std::move(ledger);
  }

  // What a worker does: one file of weights with one tensor, and says so.
  worker::v1::ShardFile WriteShard(const std::string& folder, const std::string& file, const std::string& tensor,
                                   float value) {
    worker::v1::ShardFile shard;
    shard.set_name(file);
    const std::string path = absl::StrCat(folder, "/", file);
    auto bytes = WriteSafetensors(path, {{tensor, StoredType::kF32, {1}, &value}});
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    shard.set_size_bytes(*bytes);
    shard.set_sha256(*Sha256HexOfFile(path));
    if (!absl::StartsWith(file, "optimizer")) shard.add_tensors(tensor);
    shard.set_tensor_bytes(4);
    return shard;
  }

  CheckpointContent Content(const std::string& folder, float value) {
    CheckpointContent content;
    content.shards.push_back(WriteShard(folder, "model-00001-of-00002.safetensors", "a", value));
    content.shards.push_back(WriteShard(folder, "model-00002-of-00002.safetensors", "b", value + 1));
    content.shards.push_back(WriteShard(folder, "optimizer-00001-of-00002.safetensors", "a.moment", value));
    content.config_json = "{ \"model_type\":  \"kimi_vl\" }\n";
    content.data_files = {tokenizer_};
    content.manifest.cursor.set_window(17);
    content.manifest.seed = 5;
    content.manifest.spec.mutable_pipeline()->set_stages(2);
    content.manifest.compute_threads = 1;
    content.manifest.cpu_model = "a CPU";
    content.manifest.torch_version = "2.11.0";
    content.manifest.ready_time = absl::FromUnixSeconds(1'700'000'000);
    return content;
  }

  CheckpointInfo Save(CheckpointLedger& ledger, uint64_t step, float value = 1) {
    auto folder = ledger.Begin(step);
    EXPECT_TRUE(folder.ok()) << folder.status();
    auto info = ledger.Finish(step, Content(*folder, value));
    EXPECT_TRUE(info.ok()) << info.status();
    return *info;
  }

  std::vector<uint64_t> Complete(const CheckpointLedger& ledger, Verify verify = Verify::kSizes) {
    auto list = ledger.List(verify);
    EXPECT_TRUE(list.ok()) << list.status();
    std::vector<uint64_t> steps;
    for (const CheckpointInfo& info : list->complete) steps.push_back(info.step);
    return steps;
  }
  std::string OnlyReason(const CheckpointLedger& ledger, Verify verify = Verify::kSizes) {
    auto list = ledger.List(verify);
    EXPECT_EQ(list->incomplete.size(), 1U);
    return list->incomplete.empty() ? "" : list->incomplete[0].reason;
  }
  float ValueOf(const std::string& folder) {
    auto model = ModelFolder::Open(folder);
    EXPECT_TRUE(model.ok()) << model.status();
    return *static_cast<const float*>((*model->Find("a"))->data);
  }

  std::string run_;
  std::string tokenizer_;
};

TEST_F(CheckpointLedgerTest, ACheckpointIsAModelFolderThatNamesItsFiles) {
  CheckpointLedger ledger = Open();
  const CheckpointInfo info = Save(ledger, 12, 3);
  EXPECT_EQ(info.path, run_ + "/checkpoints/step-00000012");
  EXPECT_EQ(ValueOf(info.path), 3);
  EXPECT_EQ(*ReadFile(info.path + "/config.json"), "{ \"model_type\":  \"kimi_vl\" }\n");
  EXPECT_EQ(*ReadFile(info.path + "/tiktoken.model"), "merges");
  const auto index = nlohmann::json::parse(*ReadFile(info.path + "/model.safetensors.index.json"));
  EXPECT_EQ(index.at("metadata").at("total_size"), 8);
  EXPECT_EQ(index.at("weight_map").size(), 2U);  // no optimizer state
  EXPECT_EQ(index.at("weight_map").at("b"), "model-00002-of-00002.safetensors");
  std::vector<std::string> names;
  for (const CheckpointFile& file : info.manifest.files) names.push_back(file.name);
  EXPECT_THAT(names,
              ElementsAre("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                          "model.safetensors.index.json", "optimizer-00001-of-00002.safetensors", "tiktoken.model"));
  uint64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(info.path)) bytes += entry.file_size();
  EXPECT_EQ(info.size_bytes, bytes);
  EXPECT_FALSE(fs::exists(info.path + ".writing"));
}

TEST_F(CheckpointLedgerTest, TheManifestKeepsWhatAResumeNeeds) {
  CheckpointLedger ledger = Open();
  Save(ledger, 12);
  auto read = ReadCheckpoint(run_ + "/checkpoints/step-00000012", Verify::kChecksums);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->manifest.step, 12U);
  EXPECT_EQ(read->manifest.cursor.window(), 17U);
  EXPECT_EQ(read->manifest.seed, 5U);
  EXPECT_EQ(read->manifest.spec.pipeline().stages(), 2U);
  EXPECT_EQ(read->manifest.ready_time, absl::FromUnixSeconds(1'700'000'000));
  EXPECT_THAT(DifferencesThatChangeBits(read->manifest, 1, "a CPU", "2.11.0"), IsEmpty());
  EXPECT_THAT(DifferencesThatChangeBits(read->manifest, 2, "a CPU", "2.12.0"),
              ElementsAre("compute_threads was 1, is 2", "the version of torch was 2.11.0, is 2.12.0"));
}

TEST_F(CheckpointLedgerTest, ASaveThatIsCutOffIsNeverChosenAndItsPlaceIsUsedAgain) {
  {
    CheckpointLedger ledger = Open();
    Save(ledger, 2, 2);
    // Everything is killed while step 4 is being written: one shard is whole, one is half.
    auto folder = ledger.Begin(4);
    ASSERT_TRUE(folder.ok());
    WriteShard(*folder, "model-00001-of-00002.safetensors", "a", 9);
    WriteBytes(*folder + "/model-00002-of-00002.safetensors", "half");
  }
  CheckpointLedger ledger = Open();
  EXPECT_FALSE(fs::exists(run_ + "/checkpoints/step-00000004.writing"));
  EXPECT_THAT(Complete(ledger), ElementsAre(2));
  auto choice = ledger.ChooseResume("auto");
  ASSERT_TRUE(choice.ok());
  ASSERT_TRUE(choice->checkpoint.has_value());
  EXPECT_EQ(choice->checkpoint->step, 2U);
  Save(ledger, 4, 4);
  EXPECT_EQ(ledger.ChooseResume("auto")->checkpoint->step, 4U);
  EXPECT_EQ(ValueOf(run_ + "/checkpoints/step-00000004"), 4);
}

TEST_F(CheckpointLedgerTest, AFolderWithoutItsManifestIsNoCheckpoint) {
  CheckpointLedger ledger = Open();
  Save(ledger, 2);
  const CheckpointInfo newer = Save(ledger, 4);
  fs::remove(newer.path + "/moonpipe.manifest.json");
  EXPECT_THAT(Complete(ledger), ElementsAre(2));
  EXPECT_THAT(OnlyReason(ledger), HasSubstr("no readable moonpipe.manifest.json"));
  EXPECT_EQ(ledger.ChooseResume("auto")->checkpoint->step, 2U);
}

TEST_F(CheckpointLedgerTest, EveryCutOfTheManifestIsNoCheckpoint) {
  CheckpointLedger ledger = Open();
  const std::string path = Save(ledger, 2).path + "/moonpipe.manifest.json";
  const std::string bytes = *ReadFile(path);
  for (size_t size = 0; size + 2 < bytes.size(); size += 7) {
    WriteBytes(path, bytes.substr(0, size));
    EXPECT_THAT(Complete(ledger), IsEmpty()) << size;
  }
  WriteBytes(path, bytes);
  EXPECT_THAT(Complete(ledger), ElementsAre(2));
}

TEST_F(CheckpointLedgerTest, ATruncatedShardIsNamedWithBothSizes) {
  CheckpointLedger ledger = Open();
  Save(ledger, 2);
  const CheckpointInfo newer = Save(ledger, 4);
  const std::string shard = newer.path + "/model-00002-of-00002.safetensors";
  const uintmax_t size = fs::file_size(shard);
  fs::resize_file(shard, size - 1);
  EXPECT_THAT(OnlyReason(ledger), AllOf(HasSubstr(shard), HasSubstr(absl::StrCat("has ", size - 1)),
                                        HasSubstr(absl::StrCat("says ", size))));
  EXPECT_EQ(ledger.ChooseResume("auto")->checkpoint->step, 2U);
  EXPECT_THAT(ledger.ChooseResume("auto")->reason, HasSubstr("passed over"));
  EXPECT_EQ(ledger.ChooseResume("4").status().code(), absl::StatusCode::kFailedPrecondition);
  fs::remove(shard);
  EXPECT_THAT(OnlyReason(ledger), HasSubstr("is not there"));
}

TEST_F(CheckpointLedgerTest, AChangedByteIsFoundByTheChecksumsThatAResumeAsksFor) {
  CheckpointLedger ledger = Open();
  Save(ledger, 2);
  const CheckpointInfo newer = Save(ledger, 4);
  const std::string shard = newer.path + "/optimizer-00001-of-00002.safetensors";
  std::string bytes = *ReadFile(shard);
  bytes.back() ^= 1;
  WriteBytes(shard, bytes);
  EXPECT_THAT(Complete(ledger), ElementsAre(4, 2));
  EXPECT_THAT(Complete(ledger, Verify::kChecksums), ElementsAre(2));
  EXPECT_THAT(OnlyReason(ledger, Verify::kChecksums), AllOf(HasSubstr(shard), HasSubstr("SHA-256")));
  EXPECT_EQ(ledger.ChooseResume("auto")->checkpoint->step, 2U);
}

TEST_F(CheckpointLedgerTest, FinishRefusesShardsThatAreNotAsTheirWorkersSaid) {
  CheckpointLedger ledger = Open();
  const auto refuse = [&](const std::function<void(const std::string&, CheckpointContent&)>& damage) {
    const std::string folder = *ledger.Begin(6);
    CheckpointContent content = Content(folder, 1);
    damage(folder, content);
    const absl::Status status = ledger.Finish(6, content).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(Complete(ledger), IsEmpty());
    return std::string(status.message());
  };
  EXPECT_THAT(refuse([](const std::string& folder, CheckpointContent&) {
                fs::resize_file(folder + "/model-00001-of-00002.safetensors", 3);
              }),
              AllOf(HasSubstr("has 3 bytes"), HasSubstr("its worker wrote")));
  EXPECT_THAT(refuse([](const std::string& folder, CheckpointContent&) {
                fs::remove(folder + "/model-00001-of-00002.safetensors");
              }),
              HasSubstr("is not there"));
  EXPECT_THAT(refuse([](const std::string&, CheckpointContent& content) { content.shards[1].set_tensors(0, "a"); }),
              HasSubstr("tensor a lies in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors"));
  EXPECT_THAT(refuse([](const std::string&, CheckpointContent& content) { content.shards[1].set_name("../x"); }),
              HasSubstr("../x"));
  EXPECT_THAT(refuse([](const std::string&, CheckpointContent& content) { content.shards.pop_back(); }),
              HasSubstr("belongs to no shard"));
  EXPECT_THAT(
      refuse([](const std::string&, CheckpointContent& content) { content.data_files = {"/nowhere/at/all"}; }),
      HasSubstr("/nowhere"));
  EXPECT_THAT(refuse([](const std::string&, CheckpointContent& content) { content.shards[0].set_sha256("12"); }),
              HasSubstr("SHA-256"));
  EXPECT_EQ(ledger.Finish(8, {}).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(ledger.Abandon(6).ok());
  EXPECT_TRUE(fs::is_empty(ledger.folder()));
}

TEST_F(CheckpointLedgerTest, ASecondSaveOfAStepTakesThePlaceOfTheFirst) {
  CheckpointLedger ledger = Open();
  Save(ledger, 2, 1);
  Save(ledger, 2, 8);
  EXPECT_THAT(Complete(ledger), ElementsAre(2));
  EXPECT_EQ(ValueOf(run_ + "/checkpoints/step-00000002"), 8);
  EXPECT_FALSE(fs::exists(run_ + "/checkpoints/step-00000002.writing"));
}

TEST_F(CheckpointLedgerTest, TheNewestCompleteCheckpointsAreKeptAndNeverNone) {
  CheckpointLedger ledger = Open();
  for (uint64_t step : {2, 4, 6, 8}) Save(ledger, step);
  fs::remove(run_ + "/checkpoints/step-00000008/config.json");  // no longer complete: does not count as the newest
  auto removed = ledger.Retain(2, 6);
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_THAT(*removed, ElementsAre(run_ + "/checkpoints/step-00000002"));
  EXPECT_THAT(Complete(ledger), ElementsAre(6, 4));
  ASSERT_TRUE(ledger.Retain(0, 6).ok());
  EXPECT_THAT(Complete(ledger), ElementsAre(6));
  EXPECT_FALSE(fs::exists(run_ + "/checkpoints/step-00000002"));
}

TEST_F(CheckpointLedgerTest, CheckpointsOfALaterStepThanTheNewestSaveGo) {
  CheckpointLedger ledger = Open();
  for (uint64_t step : {2, 4, 6, 8}) Save(ledger, step);
  ASSERT_TRUE(ledger.Retain(2, 4).ok());
  EXPECT_THAT(Complete(ledger), ElementsAre(4, 2));
}

TEST_F(CheckpointLedgerTest, LeftoversGoAtTheStartAndForeignFoldersStay) {
  CheckpointLedger before = Open();
  Save(before, 2);
  for (const char* name :
       {"step-00000004.writing", "step-00000001.removing", "notes", "step-7", "step-00000004.writing.old"}) {
    fs::create_directories(absl::StrCat(run_, "/checkpoints/", name));
  }
  CheckpointLedger ledger = Open();
  EXPECT_FALSE(fs::exists(run_ + "/checkpoints/step-00000004.writing"));
  EXPECT_FALSE(fs::exists(run_ + "/checkpoints/step-00000001.removing"));
  EXPECT_TRUE(fs::exists(run_ + "/checkpoints/notes"));
  EXPECT_TRUE(fs::exists(run_ + "/checkpoints/step-7"));
  EXPECT_TRUE(fs::exists(run_ + "/checkpoints/step-00000004.writing.old"));
  auto list = ledger.List();
  ASSERT_TRUE(list.ok());
  EXPECT_EQ(list->complete.size(), 1U);
  EXPECT_THAT(list->incomplete, IsEmpty());
}

TEST_F(CheckpointLedgerTest, AFolderUnderAnotherStepsNameIsNotThatStep) {
  CheckpointLedger ledger = Open();
  const CheckpointInfo info = Save(ledger, 2);
  fs::copy(info.path, run_ + "/checkpoints/step-00000009");
  EXPECT_THAT(Complete(ledger), ElementsAre(2));
  EXPECT_THAT(OnlyReason(ledger), HasSubstr("holds the manifest of step 2"));
}

TEST_F(CheckpointLedgerTest, ResumeTakesWhatItIsTold) {
  CheckpointLedger ledger = Open();
  auto fresh = ledger.ChooseResume("auto");
  ASSERT_TRUE(fresh.ok());
  EXPECT_FALSE(fresh->checkpoint.has_value());
  EXPECT_THAT(fresh->reason, HasSubstr("no complete checkpoint"));
  Save(ledger, 2);
  const CheckpointInfo newer = Save(ledger, 4);
  EXPECT_EQ(ledger.ChooseResume("")->checkpoint->step, 4U);
  EXPECT_FALSE(ledger.ChooseResume("never")->checkpoint.has_value());
  EXPECT_EQ(ledger.ChooseResume("2")->checkpoint->step, 2U);
  EXPECT_EQ(ledger.ChooseResume(newer.path)->checkpoint->step, 4U);
  EXPECT_EQ(ledger.ChooseResume("3").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ledger.ChooseResume("/nowhere/at/all").status().message()),
              AllOf(HasSubstr("checkpoint.resume is /nowhere/at/all"), HasSubstr("there is no folder")));
}

}  // namespace
}  // namespace moonpipe
