#include "moonpipe/data/step_source.h"

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/data/sample_loader.h"
#include "moonpipe/data/sample_reader.h"
#include "tests/data/testing_files.h"

namespace moonpipe {
namespace {

using data::v1::DataCursor;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> TrainFiles() { return {DigitsFolder() + "/train-{000000..000002}.tar"}; }

std::unique_ptr<StepSource> Open(const StepSourceOptions& options) {
  auto source = OpenStepSource(options);
  EXPECT_TRUE(source.ok()) << source.status();
  return *std::move(source);
}

Step Make(StepSource& source, uint64_t number, const DataCursor& cursor) {
  auto step = source.Make(number, cursor);
  EXPECT_TRUE(step.ok()) << step.status();
  return *std::move(step);
}

// Everything of a step as bytes.
std::string Bytes(const Step& step) {
  std::string bytes = step.manifest.SerializeAsString();
  for (const Microbatch& microbatch : step.microbatches) {
    for (const int32_t id : microbatch.token_ids) absl::StrAppend(&bytes, id, ",");
    for (const int32_t label : microbatch.labels) absl::StrAppend(&bytes, label, ",");
    bytes.append(microbatch.patches.begin(), microbatch.patches.end());
  }
  return bytes;
}

// A small data set of the given members, made fresh.
StepSourceOptions SmallOptions(const std::string& name, const TarMembers& members) {
  StepSourceOptions options = DigitsOptions({WriteTar(MakeFolder(name) + "/s.tar", members)});
  options.microbatches = 1;
  return options;
}

TEST(StepSource, MakesTheSameBytesFromTheSameCursorInAnyOrder) {
  const StepSourceOptions options = DigitsOptions(TrainFiles());
  const auto source = Open(options);
  EXPECT_EQ(source->size(), 3397u);
  std::vector<Step> steps;
  std::vector<DataCursor> cursors(1);
  for (uint64_t n = 1; n <= 12; ++n) {
    steps.push_back(Make(*source, n, cursors.back()));
    cursors.push_back(steps.back().manifest.next_cursor());
  }
  for (const size_t i : {7u, 0u, 11u, 3u}) {
    EXPECT_EQ(Bytes(Make(*source, i + 1, cursors[i])), Bytes(steps[i])) << "step " << i + 1 << " again";
    EXPECT_EQ(Bytes(Make(*Open(options), i + 1, cursors[i])), Bytes(steps[i])) << "step " << i + 1 << " after a restart";
  }
  EXPECT_NE(steps[0].manifest.digest(), steps[1].manifest.digest());
  EXPECT_EQ(steps[0].manifest.digest().size(), 32u);
  StepSourceOptions other = options;
  other.seed = 1;
  EXPECT_NE(Make(*Open(other), 1, {}).manifest.digest(), steps[0].manifest.digest());
}

TEST(StepSource, ShiftsPicturesAnewInEveryEpochAndNothingElse) {
  StepSourceOptions options = DigitsOptions(TrainFiles());
  const Step plain = Make(*Open(options), 1, {});
  options.random_warp.shift_pixels = 7;
  const Step shifted = Make(*Open(options), 1, {});
  EXPECT_EQ(Bytes(Make(*Open(options), 1, {})), Bytes(shifted)) << "a replay makes the same shifts";
  EXPECT_NE(shifted.manifest.digest(), plain.manifest.digest()) << "the digest tells shifted pictures from plain ones";
  ASSERT_EQ(shifted.microbatches.size(), plain.microbatches.size());
  for (size_t i = 0; i < plain.microbatches.size(); ++i) {
    EXPECT_EQ(shifted.microbatches[i].token_ids, plain.microbatches[i].token_ids);
    EXPECT_EQ(shifted.microbatches[i].patches.size(), plain.microbatches[i].patches.size());
    EXPECT_NE(shifted.microbatches[i].patches, plain.microbatches[i].patches);
  }
  // One sample alone: the same document in both epochs, seen at another place.
  options = SmallOptions("shift", {{"a.json", RecordJson("<image>", "x", {"r.png"})}, {"r.png", PngOf(28, 28, 255, 0, 0)}});
  options.random_warp.shift_pixels = 7;
  DataCursor later;
  later.set_epoch(1);
  const auto source = Open(options);
  EXPECT_NE(Make(*source, 1, {}).microbatches[0].patches, Make(*source, 2, later).microbatches[0].patches);
}

TEST(StepSource, TakesEverySampleOnceAnEpoch) {
  StepSourceOptions options = DigitsOptions(TrainFiles());
  options.microbatches = 1;
  const auto source = Open(options);
  DataCursor cursor;
  std::map<uint64_t, int> first_epoch, second_epoch;
  while (cursor.epoch() < 2) {
    const uint64_t epoch = cursor.epoch();
    const Step step = Make(*source, 1, cursor);
    EXPECT_EQ(step.manifest.skipped_size(), 0);
    for (const uint64_t sample : step.manifest.microbatches(0).samples()) ++(epoch == 0 ? first_epoch : second_epoch)[sample];
    cursor = step.manifest.next_cursor();
  }
  for (const auto& epoch : {first_epoch, second_epoch}) {
    EXPECT_EQ(epoch.size(), 3397u);
    for (const auto& [sample, count] : epoch) EXPECT_EQ(count, 1) << "sample " << sample;
  }
}

TEST(StepSource, TheManifestTellsWhatTheMicrobatchesHold) {
  const auto source = Open(DigitsOptions(TrainFiles()));
  const Step step = Make(*source, 9, {});
  EXPECT_EQ(step.manifest.step(), 9u);
  ASSERT_EQ(step.manifest.microbatches_size(), 4);
  ASSERT_EQ(step.microbatches.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    const auto& manifest = step.manifest.microbatches(i);
    const Microbatch& microbatch = step.microbatches[i];
    EXPECT_EQ(manifest.index(), i);
    EXPECT_EQ(manifest.tokens(), microbatch.token_ids.size());
    EXPECT_LE(manifest.tokens(), 256u);
    EXPECT_GT(manifest.tokens(), 200u) << "packs are filled evenly";
    EXPECT_EQ(microbatch.labels.size(), microbatch.token_ids.size());
    uint32_t tokens = 0, patches = 0;
    for (const uint32_t length : manifest.document_lengths()) tokens += length;
    for (const auto& grid : manifest.grids()) patches += grid.frames() * grid.rows() * grid.columns();
    EXPECT_EQ(tokens, manifest.tokens());
    EXPECT_EQ(manifest.samples_size(), manifest.document_lengths_size());
    EXPECT_EQ(microbatch.patches.size(), patches * 588u);
    EXPECT_EQ(manifest.feature_rows() * 4, patches);
    EXPECT_EQ(std::count(microbatch.token_ids.begin(), microbatch.token_ids.end(), 421), manifest.feature_rows());
    EXPECT_EQ(std::count_if(microbatch.labels.begin(), microbatch.labels.end(), [](int32_t l) { return l != -100; }), manifest.trained_labels());
  }
}

TEST(StepSource, LabelsAreTheAnswersOfTheirOwnSamples) {
  const auto source = Open(DigitsOptions(TrainFiles()));
  const auto tokenizer = DigitsTokenizer();
  const auto reader = SampleReader::Open({DigitsFolder() + "/train-000000.tar", DigitsFolder() + "/train-000001.tar", DigitsFolder() + "/train-000002.tar"});
  ASSERT_TRUE(reader.ok());
  const Step step = Make(*source, 1, {});
  for (int i = 0; i < 4; ++i) {
    const auto& manifest = step.manifest.microbatches(i);
    const Microbatch& microbatch = step.microbatches[i];
    size_t begin = 0;
    for (int d = 0; d < manifest.samples_size(); ++d) {
      const size_t end = begin + manifest.document_lengths(d);
      std::vector<int32_t> trained;
      for (size_t t = begin; t < end; ++t) {
        if (microbatch.labels[t] == -100) continue;
        trained.push_back(microbatch.labels[t]);
        // Not shifted: that is the last stage's part.
        EXPECT_EQ(microbatch.labels[t], microbatch.token_ids[t]);
      }
      EXPECT_EQ(tokenizer->Decode(trained), (*reader)->Read(manifest.samples(d))->record.turns[1].parts[0].text + "<|im_end|>");
      EXPECT_EQ(microbatch.labels[begin], -100);
      begin = end;
    }
  }
}

TEST(StepSource, PatchesAreThoseOfTheDocumentsInReadingOrder) {
  StepSourceOptions options = SmallOptions("colours", {{"a.json", RecordJson("<image>and<image>", "x", {"r.png", "b.png"})},
                                                       {"r.png", PngOf(28, 28, 255, 0, 0)}, {"b.png", PngOf(56, 28, 0, 0, 255)}});
  const Step step = Make(*Open(options), 1, {});
  const auto& manifest = step.manifest.microbatches(0);
  ASSERT_EQ(manifest.grids_size(), 2);
  EXPECT_EQ(manifest.grids(1).rows(), 2u);
  EXPECT_EQ(manifest.grids(1).columns(), 4u);
  EXPECT_EQ(manifest.feature_rows(), 3u);
  const std::vector<uint8_t>& patches = step.microbatches[0].patches;
  ASSERT_EQ(patches.size(), 12u * 588);
  EXPECT_EQ(patches[0], 255);
  EXPECT_EQ(patches[392], 0);
  EXPECT_EQ(patches[4 * 588], 0);
  EXPECT_EQ(patches[4 * 588 + 392], 255);
}

TEST(StepSource, ASampleBeyondTheLimitIsDroppedWholeAndCounted) {
  const TarMembers members = {{"long.json", RecordJson("abcd<image>xyz", "q", {"p.png"})}, {"p.png", PngOf(84, 84, 1, 2, 3)},
                              {"short.json", RecordJson("a", "b")}};
  StepSourceOptions options = SmallOptions("too_long", members);
  const auto lengths = [&](int32_t limit) {
    options.microbatch_tokens = limit;
    const auto step = Open(options)->Make(1, {});
    EXPECT_TRUE(step.ok()) << step.status();
    return step->manifest;
  };
  const auto whole = lengths(256);
  ASSERT_EQ(whole.microbatches(0).samples_size(), 2);
  const uint32_t longest = std::max(whole.microbatches(0).document_lengths(0), whole.microbatches(0).document_lengths(1));
  EXPECT_EQ(whole.microbatches(0).feature_rows(), 9u);
  EXPECT_EQ(whole.skipped_size(), 0);
  const auto fits = lengths(static_cast<int32_t>(longest));
  EXPECT_EQ(fits.skipped_size(), 0);
  for (const uint32_t cut : {1u, 3u, 6u, 12u}) {
    const auto dropped = lengths(static_cast<int32_t>(longest - cut));
    EXPECT_EQ(dropped.microbatches(0).feature_rows(), 0u);
    EXPECT_EQ(dropped.microbatches(0).grids_size(), 0);
    ASSERT_EQ(dropped.skipped_size(), 1);
    EXPECT_EQ(dropped.skipped(0).reason(), "too_long");
    EXPECT_EQ(dropped.skipped(0).key(), "long");
    EXPECT_EQ(dropped.skipped(0).detail(), absl::StrCat(longest, " tokens; a microbatch holds ", longest - cut));
  }
}

TEST(StepSource, DamagedPicturesAreSkippedByReasonAndNothingTakesTheirPlace) {
  TarMembers members;
  const std::string png = PngOf(28, 28, 9, 9, 9);
  const std::vector<std::string> files = {png, png, png, png.substr(0, png.size() / 2), "", "just text"};
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name = absl::StrCat("s", i, ".0.jpg");
    members.emplace_back(absl::StrCat("s", i, ".json"), RecordJson("<image>?", "x", {name}));
    members.emplace_back(name, files[i]);
  }
  const StepSourceOptions options = SmallOptions("damaged", members);
  const auto source = Open(options);
  EXPECT_EQ(source->size(), 6u);
  const Step step = Make(*source, 1, {});
  EXPECT_EQ(Bytes(Make(*Open(options), 1, {})), Bytes(step)) << "after a restart";
  std::multiset<uint64_t> trained(step.manifest.microbatches(0).samples().begin(), step.manifest.microbatches(0).samples().end());
  EXPECT_THAT(trained, ElementsAre(0, 1, 2));
  std::map<uint64_t, std::string> skipped;
  for (const auto& entry : step.manifest.skipped()) skipped[entry.sample()] = entry.reason() + " " + entry.key();
  EXPECT_THAT(skipped, ElementsAre(testing::Pair(3, "bad_picture s3"), testing::Pair(4, "bad_picture s4"), testing::Pair(5, "bad_picture s5")));
  const Step second = Make(*source, 2, step.manifest.next_cursor());
  EXPECT_EQ(second.manifest.microbatches(0).samples_size(), 3);
  EXPECT_EQ(second.manifest.skipped_size(), 3) << "they are counted again each epoch";
}

TEST(StepSource, AnEpochWithoutAUsableSampleIsAnErrorThatCountsTheReasons) {
  StepSourceOptions options = SmallOptions(
      "all_bad", {{"a.json", "{"}, {"b.json", "{}"}, {"c.json", RecordJson("<image>", "x", {"c.0.png"})}, {"c.0.png", ""}, {"d.json", "{}"}});
  for (const int32_t window : {1, 3, 256}) {
    options.packing_window = window;
    const absl::Status status = Open(options)->Make(1, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("none of the 4 samples can be used: 1 bad_json, 1 bad_picture, 2 bad_record"));
  }
  DataCursor middle;
  options.packing_window = 1;
  middle.set_window(2);
  EXPECT_EQ(Open(options)->Make(1, middle).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(StepSource, OneUsableSampleAmongBadOnesIsFoundFromEveryCursor) {
  StepSourceOptions options = SmallOptions("one_good", {{"a.json", "{"}, {"b.json", "{"}, {"c.json", RecordJson("a", "b")}, {"d.json", "{"}});
  options.packing_window = 1;
  options.microbatches = 3;
  for (uint64_t window = 0; window < 4; ++window) {
    DataCursor cursor;
    cursor.set_window(window);
    const Step step = Make(*Open(options), 1, cursor);
    for (const auto& microbatch : step.manifest.microbatches()) EXPECT_THAT(microbatch.samples(), ElementsAre(2));
    EXPECT_GE(step.manifest.next_cursor().epoch(), 2u);
  }
}

TEST(StepSource, ManifestsAreSerialisableWhateverBytesTheNamesAndRecordsHold) {
  const StepSourceOptions options = SmallOptions("bytes", {{"k\xff.json", "{\"a\": \"\xff\"}"}, {"b.json", RecordJson("a", "b")}});
  const Step step = Make(*Open(options), 1, {});
  ASSERT_EQ(step.manifest.skipped_size(), 1);
  EXPECT_EQ(step.manifest.skipped(0).key(), "k\xef\xbf\xbd");
  data::v1::StepManifest parsed;
  EXPECT_TRUE(parsed.ParseFromString(step.manifest.SerializeAsString()));
}

TEST(StepSource, ASpelledOutPlaceholderAsksForNoFeatures) {
  const StepSourceOptions options = SmallOptions("spelled", {{"a.json", RecordJson("the tag <|media_pad|> marks a picture", "<|im_end|>")}});
  const Step step = Make(*Open(options), 1, {});
  EXPECT_EQ(step.manifest.microbatches(0).feature_rows(), 0u);
  EXPECT_EQ(std::count(step.microbatches[0].token_ids.begin(), step.microbatches[0].token_ids.end(), 421), 0);
}

TEST(StepSource, RefusesATokenizerThatDoesNotFitTheModel) {
  StepSourceOptions options = DigitsOptions(TrainFiles());
  options.vocab_size = 423;
  EXPECT_THAT(OpenStepSource(options).status().message(), testing::AllOf(HasSubstr("ids up to 423"), HasSubstr("vocab_size is 423")));
  options = DigitsOptions(TrainFiles());
  options.media_placeholder_token_id = 5;
  const absl::Status status = OpenStepSource(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), testing::AllOf(HasSubstr("id 421"), HasSubstr("media_placeholder_token_id is 5")));
}

TEST(StepSource, RefusesOptionsAndCursorsThatMakeNoSense) {
  StepSourceOptions options = DigitsOptions(TrainFiles());
  options.microbatch_tokens = 0;
  EXPECT_THAT(OpenStepSource(options).status().message(), HasSubstr("microbatch_tokens is 0"));
  options = DigitsOptions({DigitsFolder() + "/none-*.tar"});
  EXPECT_EQ(OpenStepSource(options).status().code(), absl::StatusCode::kNotFound);
  const auto source = Open(DigitsOptions(TrainFiles()));
  DataCursor cursor;
  cursor.set_window(14);
  EXPECT_THAT(source->Make(1, cursor).status().message(), HasSubstr("window 14 of an epoch of 14"));
  cursor.set_window(0);
  cursor.set_pack(10000);
  EXPECT_THAT(source->Make(1, cursor).status().message(), HasSubstr("pack 10000"));
}

TEST(SampleLoader, GivesTheSameSamplesWithAndWithoutRoomToKeepThem) {
  const StepSourceOptions options = DigitsOptions({DigitsFolder() + "/heldout-one.tar"});
  const auto roomy = SampleLoader::Open(options), tight = SampleLoader::Open(options, 20000);
  ASSERT_TRUE(roomy.ok() && tight.ok());
  for (int round = 0; round < 2; ++round) {
    for (uint64_t i = 0; i < 30; ++i) {
      const auto a = (*roomy)->Prepare(i), b = (*tight)->Prepare(i);
      ASSERT_TRUE(a.ok() && b.ok());
      EXPECT_EQ((*a)->token_ids, (*b)->token_ids);
      EXPECT_EQ((*a)->patches_digest, (*b)->patches_digest);
    }
  }
  EXPECT_EQ(*(*roomy)->Prepare(0), *(*roomy)->Prepare(0)) << "kept";
}

TEST(Digits, HeldOutPicturesAreNotAmongTheTrainingPictures) {
  const auto digests = [](const std::vector<std::string>& files) {
    std::set<std::string> result;
    const auto loader = SampleLoader::Open(DigitsOptions(files));
    EXPECT_TRUE(loader.ok()) << loader.status();
    for (uint64_t i = 0; i < (*loader)->reader().size(); ++i) {
      const auto sample = (*loader)->Prepare(i);
      EXPECT_TRUE(sample.ok());
      for (size_t at = 0; at < (*sample)->patches_digest.size(); at += 64) result.insert((*sample)->patches_digest.substr(at, 64));
    }
    return result;
  };
  const std::set<std::string> train = digests(TrainFiles());
  const std::set<std::string> held_out = digests({DigitsFolder() + "/heldout-*.tar"});
  EXPECT_GT(train.size(), 1400u);
  EXPECT_GT(held_out.size(), 250u);
  for (const std::string& digest : held_out) EXPECT_EQ(train.count(digest), 0u);
}

}  // namespace
}  // namespace moonpipe
