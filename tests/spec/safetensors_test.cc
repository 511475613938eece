#include "moonpipe/spec/safetensors.h"

#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string NewFolder(const std::string& name) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/safetensors_", ::getpid(), "_", name);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string FileOf(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + data;
}

absl::Status OpenBytes(const std::string& bytes) {
  const std::string path = NewFolder("damage") + "/x.safetensors";
  WriteBytes(path, bytes);
  auto file = SafetensorsFile::Open(path);
  if (!file.ok()) {
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(path));
  }
  return file.status();
}

absl::Status OpenHeader(const std::string& header, const std::string& data = std::string(8, 'd')) {
  return OpenBytes(FileOf(header, data));
}

void ExpectInvalid(const absl::Status& status, const ::testing::Matcher<std::string>& message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), message);
}

TEST(SafetensorsTest, WhatIsWrittenIsRead) {
  const std::string path = NewFolder("round_trip") + "/x.safetensors";
  const float floats[] = {1.5F, -2, 3, 4, 5, 6};
  const uint8_t bytes[] = {7, 8, 9};
  const int64_t ids[] = {11, -12};
  const double scalar = 0.25;
  auto size = WriteSafetensors(path,
                               {{"z.bytes", StoredType::kU8, {3}, bytes},
                                {"floats", StoredType::kF32, {2, 3}, floats},
                                {"ids", StoredType::kI64, {2}, ids},
                                {"scalar", StoredType::kF64, {}, &scalar},
                                {"empty", StoredType::kBF16, {0, 4}, nullptr}},
                               {{"step", "12"}});
  ASSERT_TRUE(size.ok()) << size.status();
  EXPECT_EQ(*size, std::filesystem::file_size(path));
  EXPECT_FALSE(std::filesystem::exists(absl::StrCat(path, ".tmp.", ::getpid())));

  auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata().at("format"), "pt");
  EXPECT_EQ(file->metadata().at("step"), "12");
  std::vector<std::string> names;
  for (const StoredTensor& tensor : file->tensors()) {
    names.push_back(tensor.name);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data) % StoredTypeBytes(tensor.type), 0U) << tensor.name;
  }
  EXPECT_THAT(names, ElementsAre("empty", "floats", "ids", "scalar", "z.bytes"));
  auto found = file->Find("floats");
  ASSERT_TRUE(found.ok());
  EXPECT_EQ((*found)->ToString(), "F32[2, 3]");
  EXPECT_EQ(std::memcmp((*found)->data, floats, sizeof(floats)), 0);
  EXPECT_EQ(std::memcmp((*file->Find("ids"))->data, ids, sizeof(ids)), 0);
  EXPECT_EQ(std::memcmp((*file->Find("z.bytes"))->data, bytes, sizeof(bytes)), 0);
  EXPECT_EQ((*file->Find("empty"))->num_bytes(), 0U);
  EXPECT_THAT(std::string(file->Find("float").status().message()), HasSubstr("nearest is floats"));
}

TEST(SafetensorsTest, TheHeaderIsPaddedToEightBytesForEveryNameLength) {
  for (size_t length = 1; length <= 16; ++length) {
    const std::string path = NewFolder("padding") + "/x.safetensors";
    const float one = 1;
    ASSERT_TRUE(WriteSafetensors(path, {{std::string(length, 'n'), StoredType::kF32, {1}, &one}}).ok());
    const std::string bytes = *ReadFile(path);
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    EXPECT_EQ(header % 8, 0U);
    EXPECT_TRUE(SafetensorsFile::Open(path).ok());
  }
}

TEST(SafetensorsTest, HeadersNeedNoMetadataNoPaddingAndNoOrder) {
  const std::string header =
      R"({"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[8,12]}})";
  EXPECT_TRUE(OpenHeader(header, std::string(12, '\1')).ok());
}

TEST(SafetensorsTest, EveryCutOfAFileIsRefused) {
  const std::string path = NewFolder("cuts") + "/x.safetensors";
  const float floats[] = {1, 2, 3};
  ASSERT_TRUE(WriteSafetensors(path, {{"a", StoredType::kF32, {3}, floats}}).ok());
  const std::string bytes = *ReadFile(path);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(OpenBytes(bytes.substr(0, size)).code(), absl::StatusCode::kInvalidArgument) << size << " bytes";
  }
  ExpectInvalid(OpenBytes(bytes.substr(0, bytes.size() - 1)),
                AllOf(HasSubstr("12"), HasSubstr("11"), HasSubstr("cut off")));
  ExpectInvalid(OpenBytes(bytes + "x"), AllOf(HasSubstr("13 bytes of data"), HasSubstr("cover 12")));
}

TEST(SafetensorsTest, DamagedHeadersAreRefusedWithBothNumbers) {
  std::string huge(16, '\0');
  const uint64_t length = 100'000'001;
  std::memcpy(huge.data(), &length, 8);
  ExpectInvalid(OpenBytes(huge), AllOf(HasSubstr("100000001"), HasSubstr("100000000")));
  huge[7] = '\x7f';
  ExpectInvalid(OpenBytes(huge), HasSubstr("header of"));
  ExpectInvalid(OpenHeader("{"), HasSubstr("not JSON"));
  ExpectInvalid(OpenHeader("[]"), HasSubstr("not a JSON object"));
  ExpectInvalid(
      OpenHeader(
          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})"),
      HasSubstr("a stands twice"));
  ExpectInvalid(OpenHeader(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})"),
                AllOf(HasSubstr("tensor a"), HasSubstr("needs 12"), HasSubstr("hold 8")));
  ExpectInvalid(OpenHeader(R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})"), HasSubstr("F99"));
  ExpectInvalid(OpenHeader(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})"), HasSubstr("[-2]"));
  ExpectInvalid(OpenHeader(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})"), HasSubstr("[2.0]"));
  ExpectInvalid(OpenHeader(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})"), HasSubstr("[8,0]"));
  ExpectInvalid(OpenHeader(R"({"a":{"dtype":"F32","shape":[2]}})"), HasSubstr("data_offsets"));
  ExpectInvalid(OpenHeader(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})"),
                HasSubstr("overflows"));
  ExpectInvalid(OpenHeader(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})"), HasSubstr("hole"));
  ExpectInvalid(
      OpenHeader(
          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})"),
      AllOf(HasSubstr("tensor b"), HasSubstr("4"), HasSubstr("8"), HasSubstr("overlap")));
  ExpectInvalid(OpenHeader(R"({"__metadata__":{"n":1},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})"),
                HasSubstr("__metadata__.n"));
  EXPECT_EQ(SafetensorsFile::Open(NewFolder("none") + "/x").status().code(), absl::StatusCode::kNotFound);
}

TEST(SafetensorsTest, TheWriterRefusesWhatItCouldNotReadBack) {
  const std::string path = NewFolder("refuse") + "/x.safetensors";
  const float one = 1;
  ExpectInvalid(
      WriteSafetensors(path, {{"a", StoredType::kF32, {1}, &one}, {"a", StoredType::kF32, {1}, &one}}).status(),
      HasSubstr("a is given twice"));
  ExpectInvalid(WriteSafetensors(path, {{"", StoredType::kF32, {1}, &one}}).status(), HasSubstr("cannot name"));
  ExpectInvalid(WriteSafetensors(path, {{"a", StoredType::kF32, {-1}, &one}}).status(), HasSubstr("F32[-1]"));
  ExpectInvalid(WriteSafetensors(path, {{"a\xff", StoredType::kF32, {1}, &one}}).status(), HasSubstr("UTF-8"));
  EXPECT_FALSE(std::filesystem::exists(path));
}

std::string TwoShards(const std::string& name, const std::string& index) {
  const std::string folder = NewFolder(name);
  const float one[] = {1, 2};
  EXPECT_TRUE(WriteSafetensors(folder + "/s1.safetensors", {{"a", StoredType::kF32, {1}, one}}).ok());
  EXPECT_TRUE(WriteSafetensors(folder + "/s2.safetensors", {{"b", StoredType::kF32, {2}, one}}).ok());
  WriteBytes(folder + "/model.safetensors.index.json", index);
  return folder;
}

TEST(ModelFolderTest, FindsTensorsInShardsAndInASingleFile) {
  const std::string folder =
      TwoShards("shards", R"({"metadata":{"total_size":12},"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}})");
  auto model = ModelFolder::Open(folder);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(model->Names(), ElementsAre("a", "b"));
  EXPECT_EQ(model->FileOf("b"), "s2.safetensors");
  EXPECT_EQ((*model->Find("b"))->ToString(), "F32[2]");
  EXPECT_EQ(model->Find("c").status().code(), absl::StatusCode::kNotFound);

  const std::string single = NewFolder("single");
  const float one = 1;
  ASSERT_TRUE(WriteSafetensors(single + "/model.safetensors", {{"a", StoredType::kF32, {1}, &one}}).ok());
  auto small = ModelFolder::Open(single);
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_EQ(small->FileOf("a"), "model.safetensors");
  EXPECT_EQ(ModelFolder::Open(NewFolder("bare")).status().code(), absl::StatusCode::kNotFound);
}

TEST(ModelFolderTest, IndexAndShardsMustNameTheSameTensors) {
  ExpectInvalid(
      ModelFolder::Open(
          TwoShards("lacks", R"({"weight_map":{"a":"s1.safetensors","b":"s2.safetensors","c":"s2.safetensors"}})"))
          .status(),
      HasSubstr("no shard holds c of s2.safetensors"));
  ExpectInvalid(
      ModelFolder::Open(TwoShards("swapped", R"({"weight_map":{"a":"s2.safetensors","b":"s1.safetensors"}})")).status(),
      AllOf(HasSubstr("no shard holds a of s2.safetensors"), HasSubstr("the index lacks a of s1.safetensors")));
  ExpectInvalid(ModelFolder::Open(TwoShards("outside", R"({"weight_map":{"a":"../s1.safetensors"}})")).status(),
                HasSubstr("../s1"));
  ExpectInvalid(ModelFolder::Open(TwoShards("number", R"({"weight_map":{"a":1}})")).status(), HasSubstr("tensor a"));
  ExpectInvalid(ModelFolder::Open(TwoShards("none", R"({})")).status(), HasSubstr("weight_map"));
  EXPECT_EQ(ModelFolder::Open(TwoShards("missing", R"({"weight_map":{"a":"s3.safetensors"}})")).status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace moonpipe
