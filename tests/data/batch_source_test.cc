#include "moonpipe/data/batch_source.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMedia = 5;

ModelConfig Config(int64_t ignore_index = -100) {
  ModelConfig config;
  config.text.vocab_size = 64;
  config.text.hidden_size = 2;
  config.media_placeholder_token_id = kMedia;
  config.ignore_index = ignore_index;
  config.vision.emplace();
  config.vision->patch_size = 1;
  config.vision->merge_height = config.vision->merge_width = 2;
  return config;
}

// Tensors of a file, owned.
class Case {
 public:
  Case& Add(const std::string& name, std::vector<int64_t> shape, const std::vector<int64_t>& values) {
    return Put(name, StoredType::kI64, std::move(shape), values.data(), values.size() * sizeof(int64_t));
  }
  Case& Floats(const std::string& name, std::vector<int64_t> shape, const std::vector<float>& values) {
    return Put(name, StoredType::kF32, std::move(shape), values.data(), values.size() * sizeof(float));
  }
  Case& Bytes(const std::string& name, std::vector<int64_t> shape, const std::vector<uint8_t>& values) {
    return Put(name, StoredType::kU8, std::move(shape), values.data(), values.size());
  }

  std::string Write() const {
    static int number = 0;
    const std::string path = absl::StrCat(::testing::TempDir(), "/batch-", ::getpid(), "-", ++number, ".safetensors");
    std::vector<StoredTensor> tensors = tensors_;
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i].data = bytes_[i].data();
    EXPECT_TRUE(WriteSafetensors(path, tensors).ok());
    return path;
  }
  absl::StatusOr<Step> MakeStep(const ModelConfig& config, int32_t microbatches = 1) const {
    absl::StatusOr<std::unique_ptr<StepSource>> source = OpenBatchSource({Write(), "one", microbatches}, config);
    if (!source.ok()) return source.status();
    return (*source)->Make(1, {});
  }

 private:
  Case& Put(const std::string& name, StoredType type, std::vector<int64_t> shape, const void* data, size_t size) {
    tensors_.push_back({"one/in/" + name, type, std::move(shape), nullptr});
    bytes_.emplace_back(static_cast<const char*>(data), size);
    return *this;
  }

  std::vector<StoredTensor> tensors_;
  std::vector<std::string> bytes_;
};

// Two rows: a picture of 2 x 4 patches in the first, one of 2 x 2 in the second, which is padded.
Case TwoPictures() {
  std::vector<float> pixels;
  for (int i = 0; i < 12 * 3; ++i) pixels.push_back(static_cast<float>(i) + 1);
  return Case()
      .Add("input_ids", {2, 4}, {7, kMedia, kMedia, 8, 9, kMedia, 10, 0})
      .Add("attention_mask", {2, 4}, {1, 1, 1, 1, 1, 1, 1, 0})
      .Add("grid_thws", {2, 3}, {1, 2, 4, 1, 2, 2})
      .Floats("pixel_values", {12, 3, 1, 1}, pixels);
}

void ExpectRefused(const absl::StatusOr<Step>& step, const ::testing::Matcher<std::string>& message) {
  ASSERT_FALSE(step.ok());
  EXPECT_THAT(std::string(step.status().message()), message);
}

TEST(BatchSourceTest, OneMicrobatchHoldsAllRows) {
  const absl::StatusOr<Step> step = TwoPictures().MakeStep(Config());
  ASSERT_TRUE(step.ok()) << step.status();
  ASSERT_EQ(step->manifest.microbatches_size(), 1);
  const auto& manifest = step->manifest.microbatches(0);
  EXPECT_EQ(manifest.tokens(), 7u);
  EXPECT_EQ(manifest.feature_rows(), 3u);
  EXPECT_EQ(manifest.grids_size(), 2);
  EXPECT_EQ(manifest.trained_labels(), 2u);  // 8 and 10: not the first of a row, no placeholder
  EXPECT_EQ(manifest.pixel_type(), data::v1::PIXEL_TYPE_F32);
  EXPECT_THAT(step->microbatches[0].token_ids, ElementsAre(7, kMedia, kMedia, 8, 9, kMedia, 10));
  EXPECT_EQ(step->microbatches[0].patches.size(), 12u * 3 * 4);
}

TEST(BatchSourceTest, RowsAreDistributedWithTheirPictures) {
  const absl::StatusOr<Step> step = TwoPictures().MakeStep(Config(), 2);
  ASSERT_TRUE(step.ok()) << step.status();
  ASSERT_EQ(step->manifest.microbatches_size(), 2);
  EXPECT_EQ(step->manifest.microbatches(0).feature_rows(), 2u);
  EXPECT_EQ(step->manifest.microbatches(1).feature_rows(), 1u);
  EXPECT_EQ(step->microbatches[0].patches.size(), 8u * 3 * 4);
  // The second picture's first value is the 25th.
  EXPECT_EQ(*reinterpret_cast<const float*>(step->microbatches[1].patches.data()), 25.0f);
  EXPECT_THAT(step->microbatches[1].token_ids, ElementsAre(9, kMedia, 10));
}

TEST(BatchSourceTest, MoreMicrobatchesThanRowsAreRefusedWithBoth) {
  ExpectRefused(TwoPictures().MakeStep(Config(), 3), AllOf(HasSubstr("3 microbatches"), HasSubstr("2 rows")));
}

TEST(BatchSourceTest, EveryStepIsTheSameBatch) {
  const auto source = OpenBatchSource({TwoPictures().Write(), "one", 1}, Config());
  ASSERT_TRUE(source.ok()) << source.status();
  const absl::StatusOr<Step> one = (*source)->Make(1, {});
  const absl::StatusOr<Step> two = (*source)->Make(2, one->manifest.next_cursor());
  EXPECT_EQ(one->manifest.digest(), two->manifest.digest());
  EXPECT_EQ(two->manifest.step(), 2u);
  EXPECT_EQ(two->manifest.next_cursor().epoch(), 2u);
}

TEST(BatchSourceTest, GridsUnderAnyNameAreRead) {
  for (const char* name : {"grid_thws", "image_grid_thw", "image_grid_hws"}) {
    for (const bool frames : {true, false}) {
      Case one;
      one.Add("input_ids", {1, 2}, {7, kMedia}).Bytes("pixel_values", {4, 3, 1, 1}, std::vector<uint8_t>(12, 9));
      frames ? one.Add(name, {1, 3}, {1, 2, 2}) : one.Add(name, {1, 2}, {2, 2});
      const absl::StatusOr<Step> step = one.MakeStep(Config());
      ASSERT_TRUE(step.ok()) << step.status();
      EXPECT_EQ(step->manifest.microbatches(0).feature_rows(), 1u);
      EXPECT_EQ(step->manifest.microbatches(0).pixel_type(), data::v1::PIXEL_TYPE_U8);
    }
  }
}

TEST(BatchSourceTest, GridsThatDisagreeAreRefused) {
  ExpectRefused(TwoPictures().Add("image_grid_hws", {2, 2}, {2, 4, 4, 2}).MakeStep(Config()),
                AllOf(HasSubstr("grid_thws and image_grid_hws differ"), HasSubstr("picture 1 is 1 x 2 x 2 and 1 x 4 x 2")));
  ExpectRefused(TwoPictures().Add("image_grid_hws", {1, 2}, {2, 4}).MakeStep(Config()), AllOf(HasSubstr("2 pictures"), HasSubstr("has 1")));
  EXPECT_TRUE(TwoPictures().Add("image_grid_hws", {2, 2}, {2, 4, 2, 2}).MakeStep(Config()).ok());
}

TEST(BatchSourceTest, ClipsAreRefusedByATowerOfPictures) {
  Case one;
  one.Add("input_ids", {1, 2}, {7, kMedia}).Add("grid_thws", {1, 3}, {2, 2, 2}).Bytes("pixel_values", {8, 3, 1, 1}, std::vector<uint8_t>(24, 9));
  ExpectRefused(one.MakeStep(Config()), AllOf(HasSubstr("2 frames"), HasSubstr("takes 1")));
}

TEST(BatchSourceTest, PatchesThatDoNotFillTheGridsAreRefusedWithBoth) {
  Case one;
  one.Add("input_ids", {1, 2}, {7, kMedia}).Add("grid_thws", {1, 3}, {1, 2, 2}).Bytes("pixel_values", {3, 3, 1, 1}, std::vector<uint8_t>(9, 9));
  ExpectRefused(one.MakeStep(Config()), AllOf(HasSubstr("U8[3, 3, 1, 1]"), HasSubstr("[4, 3, 1, 1]")));
}

TEST(BatchSourceTest, ADummyPictureReachesNoToken) {
  Case one;
  one.Add("input_ids", {1, 2}, {7, 8}).Add("grid_thws", {1, 3}, {1, 2, 2}).Floats("pixel_values", {4, 3, 1, 1}, std::vector<float>(12, 0));
  const absl::StatusOr<Step> step = one.MakeStep(Config());
  ASSERT_TRUE(step.ok()) << step.status();
  const auto& manifest = step->manifest.microbatches(0);
  EXPECT_EQ(manifest.feature_rows(), 1u);
  ASSERT_EQ(manifest.masked_features_size(), 1);
  EXPECT_EQ(manifest.masked_features(0).end(), 1u);
}

TEST(BatchSourceTest, APictureThatIsNoDummyNeedsItsPlaceholders) {
  Case one;
  one.Add("input_ids", {1, 2}, {7, 8}).Add("grid_thws", {1, 3}, {1, 2, 2}).Floats("pixel_values", {4, 3, 1, 1}, std::vector<float>(12, 1));
  ExpectRefused(one.MakeStep(Config()), AllOf(HasSubstr("0 media placeholders"), HasSubstr("1 feature rows")));
}

TEST(BatchSourceTest, MaskedFeaturesCountOverThePicturesOfAMicrobatch) {
  std::vector<uint8_t> pixels(8 * 3, 1);
  Case one;
  one.Add("input_ids", {2, 2}, {7, kMedia, 8, kMedia}).Add("attention_mask", {2, 2}, {1, 1, 1, 0}).Add("grid_thws", {2, 3}, {1, 2, 2, 1, 2, 2}).Bytes("pixel_values", {8, 3, 1, 1}, pixels);
  const absl::StatusOr<Step> step = one.MakeStep(Config());
  ASSERT_TRUE(step.ok()) << step.status();
  ASSERT_EQ(step->manifest.microbatches(0).masked_features_size(), 1);
  EXPECT_EQ(step->manifest.microbatches(0).masked_features(0).begin(), 1u);
}

TEST(BatchSourceTest, TheModelsOwnIgnoreIndexMarksUntrainedLabels) {
  Case one;
  one.Add("input_ids", {1, 4}, {7, 8, 9, 10}).Add("labels", {1, 4}, {7, -1, 9, -1});
  const absl::StatusOr<Step> step = one.MakeStep(Config(-1));
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->manifest.microbatches(0).trained_labels(), 1u);
  EXPECT_THAT(step->microbatches[0].labels, ElementsAre(7, -1, 9, -1));
}

TEST(BatchSourceTest, ABatchMayStartFromEmbeddings) {
  Case one;
  one.Floats("inputs_embeds", {1, 3, 2}, {1, 2, 3, 4, 5, 6}).Add("attention_mask", {1, 3}, {1, 0, 1}).Add("labels", {1, 3}, {7, 8, 9});
  const absl::StatusOr<Step> step = one.MakeStep(Config());
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_TRUE(step->manifest.microbatches(0).has_embeddings());
  EXPECT_EQ(step->manifest.microbatches(0).tokens(), 2u);
  EXPECT_THAT(step->microbatches[0].embeddings, ElementsAre(1, 2, 5, 6));
  EXPECT_THAT(step->microbatches[0].labels, ElementsAre(7, 9));
  EXPECT_TRUE(step->microbatches[0].token_ids.empty());
}

TEST(BatchSourceTest, EmbeddingsComeAlone) {
  Case both;
  both.Floats("inputs_embeds", {1, 2, 2}, {1, 2, 3, 4}).Add("input_ids", {1, 2}, {7, 8});
  ExpectRefused(both.MakeStep(Config()), HasSubstr("one of them"));
  Case narrow;
  narrow.Floats("inputs_embeds", {1, 2, 1}, {1, 2});
  ExpectRefused(narrow.MakeStep(Config()), AllOf(HasSubstr("F32[1, 2, 1]"), HasSubstr("columns, 2]")));
}

TEST(BatchSourceTest, WhatTheModelCannotTakeIsRefused) {
  ExpectRefused(Case().Add("input_ids", {1, 2}, {7, 64}).MakeStep(Config()), AllOf(HasSubstr("id 64"), HasSubstr("vocabulary 64")));
  ExpectRefused(Case().Add("input_ids", {1, 2}, {7, 8}).Add("attention_mask", {1, 2}, {0, 0}).MakeStep(Config()), HasSubstr("masked whole"));
  ExpectRefused(Case().Add("input_ids", {1, 2}, {7, 8}).Add("labels", {1, 3}, {7, 8, 9}).MakeStep(Config()),
                AllOf(HasSubstr("I64[1, 3]"), HasSubstr("[1, 2]")));
  ExpectRefused(Case().Add("labels", {1, 2}, {7, 8}).MakeStep(Config()), HasSubstr("no tensor one/in/input_ids"));
}

}  // namespace
}  // namespace moonpipe
