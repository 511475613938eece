#include <algorithm>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/data/step_source.h"
#include "tests/data/testing_files.h"

namespace moonpipe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::unique_ptr<DecodeSource> Open(const StepSourceOptions& options) {
  auto source = OpenDecodeSource(options);
  EXPECT_TRUE(source.ok()) << source.status();
  return *std::move(source);
}

Step Make(DecodeSource& source, const std::vector<std::vector<int32_t>>& answers, const std::vector<bool>& done, bool swap = false) {
  auto step = source.Make(answers, done, swap);
  EXPECT_TRUE(step.ok()) << step.status();
  return *std::move(step);
}

// The tokens of each document, by sample.
std::map<uint64_t, std::vector<int32_t>> Documents(const Step& step) {
  std::map<uint64_t, std::vector<int32_t>> documents;
  for (size_t i = 0; i < step.microbatches.size(); ++i) {
    const auto& manifest = step.manifest.microbatches(static_cast<int>(i));
    auto at = step.microbatches[i].token_ids.begin();
    for (int d = 0; d < manifest.samples_size(); ++d) {
      documents[manifest.samples(d)].assign(at, at + manifest.document_lengths(d));
      at += manifest.document_lengths(d);
    }
  }
  return documents;
}

TEST(DecodeSource, AsksEverySampleWithItsPromptAndAnswerSoFar) {
  const auto source = Open(DigitsOptions({DigitsFolder() + "/heldout-two.tar"}));
  const auto tokenizer = DigitsTokenizer();
  ASSERT_EQ(source->size(), 300u);
  std::vector<std::vector<int32_t>> answers(300);
  std::vector<bool> done(300);
  const auto prompts = Documents(Make(*source, answers, done));
  ASSERT_EQ(prompts.size(), 300u);
  EXPECT_THAT(tokenizer->Decode(prompts.at(17)), testing::EndsWith("<|im_end|><|im_assistant|>assistant<|im_middle|>"));
  answers[17] = {65, 66};
  for (size_t i = 0; i < 300; ++i) done[i] = i != 17 && i != 200;
  const Step step = Make(*source, answers, done);
  const auto open = Documents(step);
  ASSERT_EQ(open.size(), 2u);
  std::vector<int32_t> expected = prompts.at(17);
  expected.insert(expected.end(), {65, 66});
  EXPECT_EQ(open.at(17), expected);
  EXPECT_EQ(open.at(200), prompts.at(200));
  ASSERT_EQ(step.microbatches.size(), 1u);
  EXPECT_THAT(step.microbatches[0].labels, testing::Each(-100));
  EXPECT_EQ(step.manifest.microbatches(0).trained_labels(), 0u);
  EXPECT_EQ(step.manifest.microbatches(0).feature_rows(), 16u);
  EXPECT_TRUE(Make(*source, answers, std::vector<bool>(300, true)).microbatches.empty());
}

TEST(DecodeSource, ReferencesAreTheAnswersWithTheirEnd) {
  const auto source = Open(DigitsOptions({DigitsFolder() + "/heldout-one.tar"}));
  const std::vector<std::string> words = {"zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"};
  for (size_t i = 0; i < source->size(); ++i) {
    EXPECT_THAT(words, testing::Contains(source->reference_texts()[i]));
    EXPECT_EQ(source->references()[i].back(), source->end_token());
    EXPECT_EQ(source->Text(source->references()[i]), source->reference_texts()[i]);
  }
  std::vector<int32_t> rambling = source->references()[0];
  rambling.push_back(65);
  EXPECT_EQ(source->Text(rambling), source->reference_texts()[0]) << "what follows the end is no part of the answer";
}

TEST(DecodeSource, SwapsThePicturesOfTwoPictureSamplesOnly) {
  const std::string shard = WriteTar(MakeFolder("decode_swap") + "/s.tar",
                                     {{"a.json", RecordJson("<image>and<image>", "x", {"a.0.png", "a.1.png"})},
                                      {"a.0.png", PngOf(28, 28, 255, 0, 0)}, {"a.1.png", PngOf(56, 28, 0, 255, 0)},
                                      {"b.json", RecordJson("<image>", "x", {"b.0.png"})}, {"b.0.png", PngOf(28, 28, 0, 0, 255)}});
  const auto source = Open(DigitsOptions({shard}));
  const Step straight = Make(*source, {{}, {}}, {false, false}), swapped = Make(*source, {{}, {}}, {false, false}, true);
  const auto columns = [](const Step& step) {
    std::vector<uint32_t> result;
    for (const auto& grid : step.manifest.microbatches(0).grids()) result.push_back(grid.columns());
    return result;
  };
  EXPECT_THAT(columns(straight), ElementsAre(2, 4, 2));
  EXPECT_THAT(columns(swapped), ElementsAre(4, 2, 2));
  EXPECT_EQ(straight.microbatches[0].patches[0], 255) << "red first";
  EXPECT_EQ(swapped.microbatches[0].patches[196], 255) << "green first";
  // The run of placeholders follows its picture.
  const auto first_run = [](const Step& step) {
    const auto& ids = step.microbatches[0].token_ids;
    const auto begin = std::find(ids.begin(), ids.end(), 421);
    return std::find_if(begin, ids.end(), [](int32_t id) { return id != 421; }) - begin;
  };
  EXPECT_EQ(first_run(straight), 1);
  EXPECT_EQ(first_run(swapped), 2);
  EXPECT_NE(straight.manifest.digest(), swapped.manifest.digest());
}

TEST(DecodeSource, LeavesOutWhatCannotBeDecodedAndFailsWhenNothingIsLeft) {
  const std::string folder = MakeFolder("decode_bad");
  const auto source = Open(DigitsOptions({WriteTar(folder + "/s.tar", {{"a.json", "{"}, {"b.json", RecordJson("a", "b")}})}));
  EXPECT_EQ(source->size(), 1u);
  const absl::Status status = OpenDecodeSource(DigitsOptions({WriteTar(folder + "/t.tar", {{"a.json", "{"}})})).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("none of the 1 held-out samples can be used; sample 0: bad_json"));
}

TEST(DecodeSource, RefusesAnswersThatNoLongerFit) {
  StepSourceOptions options = DigitsOptions({WriteTar(MakeFolder("decode_long") + "/s.tar", {{"a.json", RecordJson("a", "b")}})});
  const auto source = Open(options);
  EXPECT_THAT(source->Make({std::vector<int32_t>(300, 65)}, {false}, false).status().message(), HasSubstr("300 of its answer; a microbatch holds 256"));
  EXPECT_THAT(source->Make({}, {false}, false).status().message(), HasSubstr("0 answers and 1 marks for 1 samples"));
}

}  // namespace
}  // namespace moonpipe
