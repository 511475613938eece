#include "moonpipe/train/parameter_groups.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/spec/model_config.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<TensorSpec> Tensors() { return ListTensors(*ParseModelConfig(TinyConfig().dump())); }

cluster::v1::OptimizerSpec Spec() {
  cluster::v1::OptimizerSpec spec;
  spec.set_learning_rate(1);
  spec.set_weight_decay(0.5);
  return spec;
}

cluster::v1::ParameterGroup& AddGroup(cluster::v1::OptimizerSpec& spec, const std::string& match) {
  cluster::v1::ParameterGroup& group = *spec.add_groups();
  group.set_match(match);
  return group;
}

UpdateRule RuleOf(const std::string& name, const cluster::v1::OptimizerSpec& spec) {
  const std::vector<TensorSpec> tensors = Tensors();
  const auto rules = AssignUpdateRules(spec, tensors, tensors);
  EXPECT_TRUE(rules.ok()) << rules.status();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].name == name) return rules->at(i);
  }
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

constexpr char kQuery[] = "language_model.model.layers.1.self_attn.q_proj.weight";
constexpr char kBias[] = "language_model.model.layers.1.mlp.gate.e_score_correction_bias";
constexpr char kPatches[] = "vision_tower.patch_embed.proj.weight";
constexpr char kProjector[] = "multi_modal_projector.linear_1.weight";

TEST(ParameterGroupsTest, WithoutGroupsEveryTensorFollowsTheOptimizerAndBuffersAreFrozen) {
  EXPECT_EQ(RuleOf(kQuery, Spec()), (UpdateRule{1, 0.5, false}));
  EXPECT_TRUE(RuleOf(kBias, Spec()).frozen);
}

TEST(ParameterGroupsTest, APartHasItsOwnRateAndDecay) {
  cluster::v1::OptimizerSpec spec = Spec();
  AddGroup(spec, "vision").set_learning_rate(0.25);
  AddGroup(spec, "projector").set_weight_decay(0);
  EXPECT_EQ(RuleOf(kPatches, spec), (UpdateRule{0.25, 0.5, false}));
  EXPECT_EQ(RuleOf(kProjector, spec), (UpdateRule{1, 0, false}));
  EXPECT_EQ(RuleOf(kQuery, spec), (UpdateRule{1, 0.5, false}));
}

TEST(ParameterGroupsTest, AFrozenPartDoesNotMoveAndTheOthersDo) {
  cluster::v1::OptimizerSpec spec = Spec();
  AddGroup(spec, "decoder").set_frozen(true);
  EXPECT_TRUE(RuleOf(kQuery, spec).frozen);
  EXPECT_FALSE(RuleOf(kPatches, spec).frozen);
  EXPECT_FALSE(RuleOf(kProjector, spec).frozen);
}

TEST(ParameterGroupsTest, TheFirstGroupThatMatchesWins) {
  cluster::v1::OptimizerSpec spec = Spec();
  AddGroup(spec, "*layers.1.self_attn*").set_learning_rate(0.5);
  AddGroup(spec, "decoder").set_learning_rate(0.125);
  EXPECT_EQ(RuleOf(kQuery, spec).learning_rate, 0.5);
  EXPECT_EQ(RuleOf("language_model.model.layers.2.self_attn.q_proj.weight", spec).learning_rate, 0.125);
}

TEST(ParameterGroupsTest, APatternThatMatchesNothingNamesNearTensors) {
  cluster::v1::OptimizerSpec spec = Spec();
  AddGroup(spec, "vision");
  AddGroup(spec, "vision_tower.patch_embed.proj.wieght");
  const auto refused = AssignUpdateRules(spec, Tensors(), Tensors());
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("optimizer.groups[1].match"), HasSubstr("proj.wieght"), HasSubstr(kPatches)));
}

TEST(ParameterGroupsTest, AMisspeltPartNamesThePart) {
  cluster::v1::OptimizerSpec spec = Spec();
  AddGroup(spec, "projecter");
  const auto refused = AssignUpdateRules(spec, Tensors(), Tensors());
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), AllOf(HasSubstr("'projecter'"), HasSubstr("near names are projector")));
}

TEST(ParameterGroupsTest, APatternOfBuffersAloneMatchesNothing) {
  cluster::v1::OptimizerSpec spec = Spec();
  AddGroup(spec, "*e_score_correction_bias");
  EXPECT_EQ(AssignUpdateRules(spec, Tensors(), Tensors()).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ParameterGroupsTest, AGroupThatMatchesOnlyAnotherWorkersTensorsIsNoError) {
  cluster::v1::OptimizerSpec spec = Spec();
  AddGroup(spec, "vision").set_frozen(true);
  const ModelConfig config = *ParseModelConfig(TinyConfig().dump());
  const std::vector<TensorSpec> part = ListTensors(config, PartRange{.first_layer = 2, .end_layer = 4, .has_head = true});
  const auto rules = AssignUpdateRules(spec, part, ListTensors(config));
  ASSERT_TRUE(rules.ok()) << rules.status();
  EXPECT_EQ(rules->size(), part.size());
}

TEST(ParameterGroupsTest, PatternsMatchWholeNames) {
  EXPECT_TRUE(MatchesPattern("*", ""));
  EXPECT_TRUE(MatchesPattern("a*c", "abbc"));
  EXPECT_TRUE(MatchesPattern("*.layers.?.*", "model.layers.3.norm"));
  EXPECT_TRUE(MatchesPattern("*ab", "aab"));  // must step back
  EXPECT_FALSE(MatchesPattern("a", "ab"));
  EXPECT_FALSE(MatchesPattern("*.layers.?.*", "model.layers.13.norm"));
  EXPECT_FALSE(MatchesPattern("?", ""));
}

}  // namespace
}  // namespace moonpipe
