#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "moonpipe/config/run_file.h"
#include "tests/config/good_run.h"

namespace moonpipe {
namespace {

using google::protobuf::util::MessageDifferencer;

TEST(WriteYaml, PrintsTheFieldsInTheOrderOfTheSchema) {
  cluster::v1::TrainingRunSpec spec;
  spec.mutable_optimizer()->set_learning_rate(0.001);
  auto* group = spec.mutable_optimizer()->add_groups();
  group->set_match("*.bias");
  group->set_frozen(true);
  spec.mutable_data()->add_train("a.tar");
  spec.mutable_data()->add_train("b c.tar");
  spec.mutable_pipeline()->add_layers_per_stage(2);
  spec.mutable_pipeline()->add_layers_per_stage(1);
  spec.mutable_vision()->set_placement(cluster::v1::VisionSpec::PLACEMENT_FIRST_STAGE);
  spec.mutable_eval();
  EXPECT_EQ(WriteYaml(spec),
            "data:\n"
            "  train:\n"
            "    - a.tar\n"
            "    - \"b c.tar\"\n"
            "pipeline:\n"
            "  layers_per_stage: [2, 1]\n"
            "vision:\n"
            "  placement: first_stage\n"
            "optimizer:\n"
            "  learning_rate: 0.001\n"
            "  groups:\n"
            "    - match: \"*.bias\"\n"
            "      frozen: true\n"
            "eval: {}\n");
}

TEST(WriteYaml, IsReadBackAsTheSameSpec) {
  auto spec = ParseRunFile(
      absl::StrCat(kGoodRun, "eval: {sets: [{name: one, files: [a.tar, b.tar]}, {name: two, files: c.tar}]}\n"),
      "run.yaml", "/run",
      {"optimizer.groups=[{match: vision, learning_rate: 0.1}, {match: '*.bias', weight_decay: 1e-300}]",
       "train.seed=18446744073709551615"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  // Values that a careless writer would lose.
  spec->mutable_optimizer()->set_learning_rate(0.1 + 0.2);
  for (const char* text : {"/a b", "/\"x\"\\", "/tab\there\nnext", "/a: b # c", "/{0..2}", "/ünïcode"})
    spec->mutable_data()->add_train(text);
  for (const char* text :
       {"null", "~", "true", "- a", "123", "0x10", "&a", "*a", "a'b", " a ", "!t", "%d", "@", "[a]", "..."}) {
    auto* group = spec->mutable_optimizer()->add_groups();
    group->set_match(text);
    group->set_name(text);
    group->set_frozen(true);
  }
  const auto again = ParseRunFile(WriteYaml(*spec), "again.yaml", "/elsewhere");
  ASSERT_TRUE(again.ok()) << again.status() << "\n" << WriteYaml(*spec);
  EXPECT_TRUE(MessageDifferencer::Equals(*spec, *again)) << WriteYaml(*spec) << WriteYaml(*again);
}

}  // namespace
}  // namespace moonpipe
