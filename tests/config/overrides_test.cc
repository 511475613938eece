#include "moonpipe/config/overrides.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/config/run_file.h"
#include "tests/config/good_run.h"

namespace moonpipe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

absl::StatusOr<cluster::v1::TrainingRunSpec> Set(const std::vector<std::string>& overrides) {
  return ParseRunFile(kGoodRun, "run.yaml", "/run", overrides);
}

std::string Problem(const std::string& override_text) {
  const auto spec = Set({override_text});
  EXPECT_FALSE(spec.ok()) << override_text;
  return std::string(spec.status().message());
}

TEST(Overrides, SetScalarsListsAndMappings) {
  const auto spec =
      Set({"pipeline.stages=4", "data.train=[a.tar, b.tar]", "vision={placement: first_stage}", "train.steps=7"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->pipeline().stages(), 4u);
  EXPECT_EQ(spec->pipeline().microbatch_tokens(), 512u);
  EXPECT_THAT(spec->data().train(), ElementsAre("/run/a.tar", "/run/b.tar"));
  EXPECT_EQ(spec->vision().placement(), cluster::v1::VisionSpec::PLACEMENT_FIRST_STAGE);
  EXPECT_EQ(spec->train().steps(), 7u);
}

TEST(Overrides, TheLastOneWins) {
  const auto spec = Set({"train.steps=7", "train.steps=8"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->train().steps(), 8u);
}

TEST(Overrides, ReachIntoListsAndAppendAtTheirEnd) {
  const auto spec = Set({"optimizer.groups[0].match=vision", "optimizer.groups[0].learning_rate=1e-4",
                         "optimizer.groups[1].match=\"*.bias\"", "data.train[0]=x.tar", "data.train[1]=y.tar"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  ASSERT_EQ(spec->optimizer().groups_size(), 2);
  EXPECT_EQ(spec->optimizer().groups(0).learning_rate(), 1e-4);
  EXPECT_EQ(spec->optimizer().groups(1).match(), "*.bias");
  EXPECT_THAT(spec->data().train(), ElementsAre("/run/x.tar", "/run/y.tar"));
}

TEST(Overrides, AValueMayHoldAnEqualsSign) {
  const auto spec = Set({"data.tokenizer=/a=b/c"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->data().tokenizer(), "/a=b/c");
}

TEST(Overrides, NameThemselvesInTheirProblems) {
  EXPECT_THAT(Problem("pipeline.stagse=4"),
              HasSubstr("--set pipeline.stagse=4: pipeline.stagse: no such field; did you mean stages?"));
  EXPECT_THAT(Problem("pipeline.stages=many"),
              HasSubstr("--set pipeline.stages=many: pipeline.stages: expected a whole number"));
  EXPECT_THAT(Problem("pipeline.stages=0"),
              HasSubstr("--set pipeline.stages=0: pipeline.stages: must be from 1 to 1024, found 0"));
  EXPECT_THAT(Problem("pipeline.stages"), HasSubstr("expected FIELD=VALUE"));
  EXPECT_THAT(Problem("=4"), HasSubstr("expected FIELD=VALUE"));
  EXPECT_THAT(Problem("pipeline.stages=[4"), HasSubstr("pipeline.stages: the value is not YAML"));
  EXPECT_THAT(Problem("pipeline.stages="), HasSubstr("found nothing"));
}

TEST(Overrides, RefusePathsThatDoNotFitTheSchema) {
  EXPECT_THAT(Problem("optimizer.groups[1].match=vision"),
              HasSubstr("optimizer.groups[1]: the list has 0 elements; the next index is 0"));
  EXPECT_THAT(Problem("optimizer.groups.match=vision"),
              HasSubstr("is a list; say which element, as in optimizer.groups[0]"));
  EXPECT_THAT(Problem("pipeline[0].stages=1"), HasSubstr("pipeline: is not a list and takes no index"));
  EXPECT_THAT(Problem("train.steps.x=1"), HasSubstr("train.steps: has no fields of its own"));
  EXPECT_THAT(Problem("data.train[0].x=1"), HasSubstr("data.train[0]: has no fields of its own"));
  EXPECT_THAT(Problem("data.train[-1]=x"), HasSubstr("is not a field name or a name with an index"));
  EXPECT_THAT(Problem("pipeline..stages=1"), HasSubstr("is not a field name"));
}

}  // namespace
}  // namespace moonpipe
