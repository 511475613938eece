#include "moonpipe/data/batch_layout.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kMedia = 5;
constexpr int64_t kIgnore = -100;

// One row of text tokens 10, 11, .. unless ids are given.
struct Row {
  std::vector<int64_t> ids = {}, mask = {}, positions = {}, labels = {};
  std::vector<int64_t> feature_rows = {};
  int64_t rows = 1;
};

absl::StatusOr<BatchLayout> LayOut(Row row) {
  if (row.ids.empty()) {
    const size_t columns = std::max({row.mask.size(), row.positions.size(), row.labels.size()});
    for (size_t i = 0; i < columns; ++i) row.ids.push_back(10 + static_cast<int64_t>(i));
  }
  BatchInputs inputs;
  inputs.rows = row.rows;
  inputs.columns = static_cast<int64_t>(row.ids.size()) / row.rows;
  inputs.input_ids = row.ids;
  inputs.attention_mask = row.mask;
  inputs.position_ids = row.positions;
  inputs.labels = row.labels;
  inputs.feature_rows = row.feature_rows;
  inputs.media_token = kMedia;
  return LayOutBatch(inputs);
}

RowLayout Only(const Row& row) {
  const absl::StatusOr<BatchLayout> layout = LayOut(row);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return layout.ok() ? layout->rows.at(0) : RowLayout();
}

void ExpectRefused(const Row& row, const ::testing::Matcher<std::string>& message) {
  const absl::StatusOr<BatchLayout> layout = LayOut(row);
  ASSERT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(layout.status().message()), message);
}

std::vector<std::pair<uint32_t, uint32_t>> Masked(const RowLayout& row) {
  std::vector<std::pair<uint32_t, uint32_t>> spans;
  for (const auto& span : row.masked_features) spans.emplace_back(span.begin(), span.end());
  return spans;
}

TEST(BatchLayoutTest, PositionsCountWithinDocumentsAndSkipMaskedTokens) {
  EXPECT_THAT(Only({.mask = {1, 1, 0, 0, 1, 2, 2, 0}}).positions, ElementsAre(0, 1, 1, 1, 2, 0, 1, 1));
  EXPECT_THAT(Only({.mask = {1, 1, 0, 1, 1}}).positions, ElementsAre(0, 1, 1, 2, 3));
}

TEST(BatchLayoutTest, MaskedTokensLeaveAndDocumentsStandTogether) {
  const RowLayout row = Only({.mask = {1, 1, 0, 0, 1, 2, 2, 0}});
  EXPECT_THAT(row.places, ElementsAre(0, 1, 4, 5, 6));
  EXPECT_THAT(row.token_ids, ElementsAre(10, 11, 14, 15, 16));
  EXPECT_THAT(row.labels, ElementsAre(10, 11, 14, 15, 16));
  EXPECT_THAT(row.document_lengths, ElementsAre(3, 2));
}

TEST(BatchLayoutTest, WithoutAMaskARowIsOneDocument) {
  const RowLayout row = Only({.ids = {7, 8, 9}});
  EXPECT_THAT(row.document_lengths, ElementsAre(3));
  EXPECT_THAT(row.positions, ElementsAre(0, 1, 2));
}

TEST(BatchLayoutTest, PositionsThatBeginAnewBeginADocument) {
  EXPECT_THAT(Only({.positions = {0, 1, 2, 0, 1}}).document_lengths, ElementsAre(3, 2));
  EXPECT_THAT(Only({.mask = {1, 1, 1, 1, 0}, .positions = {0, 1, 0, 1, 0}}).document_lengths, ElementsAre(2, 2));
}

TEST(BatchLayoutTest, PositionsThatAreNotConsecutiveAreRefused) {
  ExpectRefused({.positions = {0, 1, 3}}, AllOf(HasSubstr("token 2 is 3 after 1"), HasSubstr("row 0")));
  // Masked tokens may have any.
  EXPECT_THAT(Only({.mask = {1, 0, 1}, .positions = {0, 9, 1}}).document_lengths, ElementsAre(2));
}

TEST(BatchLayoutTest, ADocumentThatComesBackIsRefused) {
  ExpectRefused({.mask = {1, 2, 1}}, AllOf(HasSubstr("document 1"), HasSubstr("token 2"), HasSubstr("document 2")));
  ExpectRefused({.mask = {1, -1}}, HasSubstr("is -1"));
}

TEST(BatchLayoutTest, LabelsThatAreAbsentAreTheTokensButForPlaceholders) {
  EXPECT_THAT(Only({.ids = {7, kMedia, kMedia, 8}, .feature_rows = {2}}).labels, ElementsAre(7, kIgnore, kIgnore, 8));
}

TEST(BatchLayoutTest, GivenLabelsAreKeptButForPlaceholders) {
  EXPECT_THAT(Only({.ids = {7, kMedia, 8}, .labels = {kIgnore, 3, 8}, .feature_rows = {1}}).labels, ElementsAre(kIgnore, kIgnore, 8));
}

TEST(BatchLayoutTest, ACompactPlaceholderBecomesOneTokenAFeatureRow) {
  const auto layout = LayOut({.ids = {7, kMedia, 8, 0, 9, 8, 7, 6}, .mask = {1, 1, 1, 0, 1, 1, 1, 1}, .labels = {1, 2, 3, 4, 5, 6, 7, 8}, .feature_rows = {3}, .rows = 2});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->columns, 6);
  EXPECT_THAT(layout->rows[0].token_ids, ElementsAre(7, kMedia, kMedia, kMedia, 8));
  EXPECT_THAT(layout->rows[0].labels, ElementsAre(1, kIgnore, kIgnore, kIgnore, 3));
  EXPECT_THAT(layout->rows[0].positions, ElementsAre(0, 1, 2, 3, 4, 1));
  EXPECT_THAT(layout->rows[0].places, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(layout->rows[1].places, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(layout->rows[0].end_picture, 1u);
  EXPECT_EQ(layout->rows[1].first_picture, 1u);
}

TEST(BatchLayoutTest, ARowThatIsPaddedOnTheLeftKeepsItsRightEnd) {
  const auto layout = LayOut({.ids = {0, 7, 8, 9, 0, 7, kMedia, 8}, .mask = {0, 1, 1, 1, 0, 1, 1, 1}, .feature_rows = {3}, .rows = 2});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->columns, 6);
  EXPECT_THAT(layout->rows[0].places, ElementsAre(3, 4, 5));
  EXPECT_THAT(layout->rows[0].positions, ElementsAre(1, 1, 1, 0, 1, 2));
  EXPECT_THAT(layout->rows[1].places, ElementsAre(1, 2, 3, 4, 5));
  EXPECT_THAT(layout->rows[1].token_ids, ElementsAre(7, kMedia, kMedia, kMedia, 8));
}

TEST(BatchLayoutTest, FeatureRowsOfMaskedPlaceholdersAreNamed) {
  // Two pictures of two rows; the first is masked whole, of the second the last placeholder.
  const RowLayout row = Only({.ids = {7, kMedia, kMedia, 8, kMedia, kMedia}, .mask = {1, 0, 0, 1, 1, 0}, .feature_rows = {2, 2}});
  EXPECT_THAT(Masked(row), ElementsAre(std::pair(0u, 2u), std::pair(3u, 4u)));
  EXPECT_THAT(row.token_ids, ElementsAre(7, 8, kMedia));
  // In the compact form the one placeholder is masked with all its rows.
  const RowLayout compact = Only({.ids = {7, kMedia, 8}, .mask = {1, 0, 1}, .feature_rows = {4}});
  EXPECT_THAT(Masked(compact), ElementsAre(std::pair(0u, 4u)));
  EXPECT_THAT(compact.token_ids, ElementsAre(7, 8));
}

TEST(BatchLayoutTest, PicturesWithoutPlaceAreMaskedWhole) {
  const std::vector<int64_t> ids = {7, 8, 9, 10};
  BatchInputs inputs;
  inputs.rows = inputs.columns = 2;
  inputs.input_ids = ids;
  inputs.media_token = kMedia;
  inputs.feature_rows = {4};
  inputs.pictures_without_place = true;
  const auto layout = LayOutBatch(inputs);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_THAT(Masked(layout->rows[0]), ElementsAre(std::pair(0u, 4u)));
  EXPECT_EQ(layout->rows[0].end_picture, 1u);
  EXPECT_EQ(layout->rows[1].first_picture, 1u);
  EXPECT_THAT(Masked(layout->rows[1]), IsEmpty());
}

TEST(BatchLayoutTest, CountsThatDoNotFitAreRefusedWithBoth) {
  ExpectRefused({.ids = {7, kMedia, kMedia, kMedia}, .feature_rows = {2, 2}}, AllOf(HasSubstr("3 media placeholders"), HasSubstr("2 pictures"), HasSubstr("4 feature rows")));
  ExpectRefused({.ids = {7, 8}, .feature_rows = {2}}, AllOf(HasSubstr("0 media placeholders"), HasSubstr("2 feature rows")));
  ExpectRefused({.ids = {7, kMedia}}, AllOf(HasSubstr("1 media placeholders"), HasSubstr("0 pictures")));
  ExpectRefused({.ids = {7, 8}, .mask = {1, 1, 1}}, AllOf(HasSubstr("3 entries"), HasSubstr("1 x 2")));
}

TEST(BatchLayoutTest, APictureWhosePlaceholdersAreNoRunIsRefused) {
  // The sums fit; the runs are those of pictures in another order.
  ExpectRefused({.ids = {kMedia, 7, kMedia, kMedia}, .feature_rows = {2, 1}}, AllOf(HasSubstr("picture 0 has 2 feature rows"), HasSubstr("has 1")));
}

TEST(BatchLayoutTest, TheFirstLabelOfADocumentIsNotTrained) {
  const std::vector<int32_t> labels = {1, 2, kIgnore, 4, 5};
  const std::vector<uint32_t> one = {5}, two = {3, 2};
  EXPECT_EQ(CountTrainedLabels(labels, one, kIgnore), 3u);
  EXPECT_EQ(CountTrainedLabels(labels, two, kIgnore), 2u);
  EXPECT_EQ(CountTrainedLabels(labels, one, 4), 3u);
}

}  // namespace
}  // namespace moonpipe
