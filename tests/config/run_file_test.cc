#include "moonpipe/config/run_file.h"

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "tests/config/good_run.h"

namespace moonpipe {
namespace {

using cluster::v1::LearningRateSchedule;
using cluster::v1::VisionSpec;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

std::string Problems(const std::string& text) {
  const auto spec = ParseRunFile(text, "run.yaml", "/run");
  EXPECT_FALSE(spec.ok()) << text;
  EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(spec.status().message());
}

// The good run with one more line at its end.
std::string WithLine(const std::string& line) { return absl::StrCat(kGoodRun, line, "\n"); }

TEST(RunFile, ReadsEveryKindOfField) {
  const auto spec = ParseRunFile(absl::StrReplaceAll(kGoodRun, {{"optimizer: {learning_rate: 1e-3}\n",
                                                                 "optimizer:\n"
                                                                 "  learning_rate: 1e-3\n"
                                                                 "  schedule: {kind: WSD, warmup_steps: 10}\n"
                                                                 "  groups:\n"
                                                                 "  - {name: tower, match: vision, frozen: true}\n"
                                                                 "  - {match: \"*.bias\", weight_decay: 0}\n"
                                                                 "vision: {placement: first-stage}\n"
                                                                 "checkpoint: {resume: 100}\n"}}),
                                 "run.yaml", "/run");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->model().config(), "/run/model/config.json");
  EXPECT_THAT(spec->data().train(), ElementsAre("/run/train-{000000..000002}.tar"));
  EXPECT_EQ(spec->pipeline().microbatch_tokens(), 512u);
  EXPECT_EQ(spec->optimizer().learning_rate(), 1e-3);
  EXPECT_EQ(spec->optimizer().schedule().kind(), LearningRateSchedule::KIND_WSD);
  EXPECT_EQ(spec->optimizer().groups(0).name(), "tower");
  EXPECT_TRUE(spec->optimizer().groups(0).frozen());
  EXPECT_EQ(spec->optimizer().groups(1).match(), "*.bias");
  EXPECT_EQ(spec->optimizer().groups(1).weight_decay(), 0.0);
  EXPECT_EQ(spec->vision().placement(), VisionSpec::PLACEMENT_FIRST_STAGE);
  EXPECT_EQ(spec->checkpoint().resume(), "100");
}

TEST(RunFile, TakesAListOrASingleValue) {
  const auto spec = ParseRunFile(absl::StrReplaceAll(kGoodRun, {{"train-{000000..000002}.tar", "[a.tar, /far/b.tar]"}}),
                                 "run.yaml", "/run");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_THAT(spec->data().train(), ElementsAre("/run/a.tar", "/far/b.tar"));
  const auto recorded = ParseRunFile(absl::StrReplaceAll(kGoodRun, {{"train: train-{000000..000002}.tar", "{batches: io.safetensors, batch_case: one}"},
                                                                    {"  tokenizer: tokenizer\n", ""}}),
                                     "run.yaml", "/run");
  ASSERT_TRUE(recorded.ok()) << recorded.status();
  EXPECT_EQ(recorded->data().batches(), "/run/io.safetensors");
}

TEST(RunFile, NamesTheNearestOfAnUnknownField) {
  EXPECT_THAT(Problems(absl::StrReplaceAll(
                  kGoodRun, {{"  microbatch_tokens: 512\n", "  microbatch_tokens: 512\n  stagse: 4\n"}})),
              testing::StrEq("run.yaml has 1 problem:\n"
                             "  run.yaml:7:3: pipeline.stagse: no such field; did you mean stages?"));
}

TEST(RunFile, FindsAFieldThatStandsInTheWrongPlace) {
  EXPECT_THAT(Problems(WithLine("stages: 4")),
              HasSubstr("run.yaml:9:1: stages: no such field; did you mean pipeline.stages?"));
}

TEST(RunFile, ListsTheKnownFieldsWhenNoneIsNear) {
  EXPECT_THAT(Problems(WithLine("vision: {zzzzzzzzzzzzzzzzzz: 1}")),
              HasSubstr("vision.zzzzzzzzzzzzzzzzzz: no such field; known are placement"));
}

TEST(RunFile, AMisspeltRequiredFieldIsOneProblem) {
  EXPECT_THAT(
      Problems(absl::StrReplaceAll(kGoodRun, {{"microbatch_tokens", "microbatch_token"}})),
      testing::StrEq("run.yaml has 1 problem:\n"
                     "  run.yaml:6:3: pipeline.microbatch_token: no such field; did you mean microbatch_tokens?"));
}

TEST(RunFile, SaysWhatWasFoundAndExpected) {
  const std::string text = Problems(
      "model: [a]\n"
      "data: {train: {a: b}, tokenizer: [x], allow_outside_paths: yes}\n"
      "pipeline: {stages: -1, microbatch_tokens: '512', microbatches: 4294967296}\n"
      "vision: {placement: servce}\n"
      "train: {steps: 1.5, max_grad_norm: .inf}\n"
      "optimizer: {learning_rate: fast}\n");
  EXPECT_THAT(text, HasSubstr("run.yaml has 11 problems:"));
  EXPECT_THAT(text, HasSubstr("run.yaml:1:8: model: expected a mapping with path, config, flavor, "));
  EXPECT_THAT(text, HasSubstr("run.yaml:2:15: data.train: expected a list, each text; found a mapping"));
  EXPECT_THAT(text, HasSubstr("run.yaml:2:34: data.tokenizer: expected text; found a list of 1"));
  EXPECT_THAT(text, HasSubstr("data.allow_outside_paths: expected true or false; found \"yes\""));
  EXPECT_THAT(text, HasSubstr("pipeline.stages: expected a whole number from 0 to 4294967295; found \"-1\""));
  EXPECT_THAT(
      text,
      HasSubstr(
          "pipeline.microbatch_tokens: expected a whole number from 0 to 4294967295; found the quoted text \"512\""));
  EXPECT_THAT(text,
              HasSubstr("pipeline.microbatches: expected a whole number from 0 to 4294967295; found \"4294967296\""));
  EXPECT_THAT(
      text,
      HasSubstr("vision.placement: expected one of service, first_stage; found \"servce\"; did you mean service?"));
  EXPECT_THAT(text, HasSubstr("train.steps: expected a whole number from 0 to 18446744073709551615; found \"1.5\""));
  EXPECT_THAT(text, HasSubstr("train.max_grad_norm: expected a finite number; found \".inf\""));
  EXPECT_THAT(text, HasSubstr("optimizer.learning_rate: expected a finite number; found \"fast\""));
}

TEST(RunFile, ReportsRangesBesideTypesWithTheirPlace) {
  const std::string text = Problems(WithLine("runtime:\n  compute_threads: 0\n  step_timeout_seconds: soon"));
  EXPECT_THAT(
      text, AllOf(HasSubstr("run.yaml has 2 problems"),
                  HasSubstr("run.yaml:10:3: runtime.compute_threads: must be from 1 to 1024, found 0"),
                  HasSubstr("run.yaml:11:25: runtime.step_timeout_seconds: expected a finite number; found \"soon\"")));
}

TEST(RunFile, AnEmptyFileLacksAllThatIsRequired) {
  const std::string text = Problems("");
  for (const char* field : {"model:", "data.train:", "data.tokenizer:", "pipeline.microbatch_tokens:", "train.steps:",
                            "optimizer.learning_rate:"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("run.yaml: ", field, " is required")));
  }
}

TEST(RunFile, RefusesAKeyGivenTwice) {
  EXPECT_THAT(Problems(WithLine("train: {steps: 300}")),
              HasSubstr("run.yaml:9:1: train: is given twice, first in line 7; keep one"));
}

TEST(RunFile, ReportsASyntaxErrorWithLineAndColumn) {
  EXPECT_THAT(Problems("model: {config: a\ndata: [\n"), testing::MatchesRegex("run.yaml:[0-9]+:[0-9]+: not YAML: .*"));
  EXPECT_THAT(Problems("a: b\n\tc: d\n"), HasSubstr("run.yaml:2:1: not YAML: "));
}

TEST(RunFile, RefusesASecondDocument) {
  EXPECT_THAT(Problems(WithLine("---\ntrain: {}")), HasSubstr("has 2 YAML documents"));
}

TEST(RunFile, FollowsAnchorsAliasesAndMergeKeys) {
  const auto spec = ParseRunFile(WithLine("eval:\n"
                                          "  sets:\n"
                                          "  - &one {name: one, files: &files [a.tar]}\n"
                                          "  - {name: two, files: *files}\n"
                                          "  - {<<: *one, name: three}"),
                                 "run.yaml", "/run");
  ASSERT_TRUE(spec.ok()) << spec.status();
  ASSERT_EQ(spec->eval().sets_size(), 3);
  EXPECT_THAT(spec->eval().sets(1).files(), ElementsAre("/run/a.tar"));
  EXPECT_EQ(spec->eval().sets(2).name(), "three");
  EXPECT_THAT(spec->eval().sets(2).files(), ElementsAre("/run/a.tar"));
}

TEST(RunFile, AMappingThatMergesItselfIsAnError) {
  EXPECT_THAT(Problems(WithLine("vision: &v {<<: *v, placement: service}")), HasSubstr("nested too deeply"));
}

TEST(RunFile, ANullSectionIsAnEmptyOneAndANullValueAnError) {
  EXPECT_TRUE(ParseRunFile(WithLine("runtime:"), "run.yaml", "/run").ok());
  EXPECT_THAT(Problems(WithLine("runtime: {compute_threads: }")),
              HasSubstr("found nothing; leave the field out to take its default"));
}

TEST(RunFile, LoadsFromAFileAndResolvesPathsAgainstItsFolder) {
  const std::string folder = testing::TempDir();
  const std::string path = folder + "/good_run.yaml";
  ASSERT_TRUE(WriteFileAtomically(path, WithLine("eval: {sets: [{name: one, files: ../one.tar}]}")).ok());
  const auto spec = LoadRunFile(path, {"pipeline.stages=4"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_THAT(spec->data().tokenizer(), testing::EndsWith("/tokenizer"));
  EXPECT_THAT(spec->data().tokenizer(), testing::StartsWith("/"));
  EXPECT_THAT(spec->eval().sets(0).files(0), AllOf(testing::EndsWith("/one.tar"), Not(HasSubstr(".."))));
  EXPECT_EQ(spec->pipeline().stages(), 4u);
  std::remove(path.c_str());
}

TEST(RunFile, AMissingFileIsNotFound) {
  const auto spec = LoadRunFile(testing::TempDir() + "/absent.yaml");
  EXPECT_EQ(spec.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(spec.status().message(), HasSubstr("absent.yaml"));
}

}  // namespace
}  // namespace moonpipe
