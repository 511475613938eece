#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/config/run_file.h"
#include "tests/config/good_run.h"

namespace moonpipe {
namespace {

using cluster::v1::LearningRateSchedule;
using cluster::v1::TrainingRunSpec;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

TrainingRunSpec GoodSpec() { return ParseRunFile(kGoodRun, "run.yaml", "/run").value(); }

// The fields that are wrong after `spoil`.
std::vector<std::string> WrongFields(const std::function<void(TrainingRunSpec&)>& spoil) {
  TrainingRunSpec spec = GoodSpec();
  spoil(spec);
  std::vector<std::string> fields;
  for (const FieldViolation& violation : ValidateSpec(spec)) fields.push_back(violation.field);
  return fields;
}

TEST(SpecValidation, AGoodSpecHasNoViolation) { EXPECT_THAT(ValidateSpec(GoodSpec()), IsEmpty()); }

TEST(SpecValidation, AnEmptySpecNamesEveryRequiredField) {
  std::vector<std::string> fields;
  for (const FieldViolation& violation : ValidateSpec(TrainingRunSpec())) fields.push_back(violation.field);
  EXPECT_THAT(fields, ElementsAre("model", "data.train", "data.tokenizer", "pipeline.microbatch_tokens", "train.steps",
                                  "optimizer.learning_rate"));
}

TEST(SpecValidation, ARecordedBatchTakesThePlaceOfSamples) {
  const auto recorded = [](TrainingRunSpec& s) {
    s.mutable_data()->clear_train();
    s.mutable_data()->clear_tokenizer();
    s.mutable_pipeline()->clear_microbatch_tokens();
    s.mutable_data()->set_batches("/recordings/io.safetensors");
    s.mutable_data()->set_batch_case("padded");
  };
  EXPECT_THAT(WrongFields(recorded), IsEmpty());
  EXPECT_THAT(WrongFields([&](auto& s) {
                recorded(s);
                s.mutable_data()->add_train("a.tar");
              }),
              ElementsAre("data.batches"));
  EXPECT_THAT(WrongFields([&](auto& s) {
                recorded(s);
                s.mutable_data()->clear_batch_case();
              }),
              ElementsAre("data.batch_case"));
  EXPECT_THAT(WrongFields([&](auto& s) {
                recorded(s);
                s.mutable_data()->set_batches("");
              }),
              ElementsAre("data.batches"));
  // Answers are text.
  EXPECT_THAT(WrongFields([&](auto& s) {
                recorded(s);
                auto* set = s.mutable_eval()->add_sets();
                set->set_name("held-out");
                set->add_files("a.tar");
              }),
              ElementsAre("eval.sets"));
  EXPECT_THAT(WrongFields([](auto& s) { s.mutable_data()->set_batch_case("padded"); }), ElementsAre("data.batch_case"));
}

TEST(SpecValidation, TheModelIsExactlyOne) {
  EXPECT_THAT(WrongFields([](auto& s) { s.mutable_model()->set_flavor("kimi-vl-a3b"); }), ElementsAre("model"));
  EXPECT_THAT(WrongFields([](auto& s) { s.mutable_model()->set_config(""); }), ElementsAre("model.config"));
}

TEST(SpecValidation, OnlyTheWeightsOfAFolderCanBeKeptQuantised) {
  EXPECT_THAT(WrongFields([](auto& s) { s.mutable_model()->set_keep_quantised(true); }), ElementsAre("model.keep_quantised"));
  EXPECT_THAT(WrongFields([](auto& s) {
                s.mutable_model()->clear_config();
                s.mutable_model()->set_path("folder");
                s.mutable_model()->set_keep_quantised(true);
              }),
              IsEmpty());
}

TEST(SpecValidation, AFlavorIsKnown) {
  const auto only_flavor = [](auto& s) {
    s.mutable_model()->clear_config();
    s.mutable_model()->set_flavor("Kimi_VL_A3B");
  };
  EXPECT_THAT(WrongFields(only_flavor), IsEmpty());
  EXPECT_THAT(WrongFields([&](auto& s) {
                only_flavor(s);
                s.mutable_model()->set_flavor("kimi-vl-a4b");
              }),
              ElementsAre("model.flavor"));
}

TEST(SpecValidation, NamesAreKnown) {
  EXPECT_THAT(WrongFields([](auto& s) {
                s.mutable_model()->set_experts("group");
                s.mutable_model()->set_attention("flash");
                s.mutable_model()->set_norm_rounding("after");
                s.mutable_train()->set_expert_bias_rule("signs");
                s.mutable_train()->set_compute_type("fp16");
                s.mutable_train()->set_recompute("some");
                s.mutable_optimizer()->set_kind("adam");
                s.mutable_optimizer()->add_groups()->set_match("vision");
                s.mutable_optimizer()->mutable_groups(0)->set_kind("sgd");
                s.mutable_data()->set_chat_template("kimi");
                s.mutable_data()->set_too_long("cut");
                s.mutable_pipeline()->set_schedule("1f1c");
                s.mutable_vision()->set_placement(static_cast<cluster::v1::VisionSpec::Placement>(9));
              }),
              UnorderedElementsAre("model.experts", "model.attention", "model.norm_rounding", "train.expert_bias_rule", "train.compute_type",
                                   "train.recompute", "optimizer.kind", "optimizer.groups[0].kind", "data.chat_template", "data.too_long",
                                   "pipeline.schedule", "vision.placement"));
}

TEST(SpecValidation, CountsAreAtLeastOne) {
  EXPECT_THAT(
      WrongFields([](auto& s) {
        s.mutable_data()->set_packing_window(0);
        s.mutable_data()->set_max_patches(0);
        s.mutable_data()->set_random_rotation_degrees(-1);
        s.mutable_data()->set_random_scale(-0.5);
        s.mutable_pipeline()->set_stages(0);
        s.mutable_pipeline()->set_microbatches(0);
        s.mutable_pipeline()->set_microbatch_tokens(1);
        s.mutable_train()->set_steps(0);
        s.mutable_train()->set_gradient_groups(0);
        s.mutable_checkpoint()->set_keep_last(0);
        s.mutable_eval()->set_max_answer_tokens(0);
        s.mutable_runtime()->set_compute_threads(0);
        s.mutable_runtime()->set_max_edge_message_bytes(0);
      }),
      UnorderedElementsAre("data.packing_window", "data.max_patches", "data.random_rotation_degrees", "data.random_scale", "pipeline.stages", "pipeline.microbatches",
                           "pipeline.microbatch_tokens", "train.steps", "train.gradient_groups", "checkpoint.keep_last",
                           "eval.max_answer_tokens", "runtime.compute_threads", "runtime.max_edge_message_bytes"));
}

TEST(SpecValidation, NumbersAreFiniteAndInRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(WrongFields([nan](auto& s) {
                s.mutable_train()->set_max_grad_norm(-1);
                s.mutable_train()->set_expert_bias_rate(nan);
                s.mutable_optimizer()->set_learning_rate(-1);
                s.mutable_optimizer()->set_beta1(1);
                s.mutable_optimizer()->set_beta2(nan);
                s.mutable_optimizer()->set_epsilon(0);
                s.mutable_optimizer()->set_weight_decay(-0.1);
                s.mutable_optimizer()->mutable_schedule()->set_min_ratio(1.5);
                s.mutable_runtime()->set_heartbeat_timeout_seconds(0);
                s.mutable_runtime()->set_step_timeout_seconds(nan);
                s.mutable_runtime()->set_start_timeout_seconds(-1);
                s.mutable_runtime()->set_save_timeout_seconds(0);
              }),
              UnorderedElementsAre("train.max_grad_norm", "train.expert_bias_rate", "optimizer.learning_rate",
                                   "optimizer.beta1", "optimizer.beta2", "optimizer.epsilon", "optimizer.weight_decay",
                                   "optimizer.schedule.min_ratio", "runtime.heartbeat_timeout_seconds",
                                   "runtime.step_timeout_seconds", "runtime.start_timeout_seconds",
                                   "runtime.save_timeout_seconds"));
}

TEST(SpecValidation, LayersAreGivenForEveryStage) {
  EXPECT_THAT(WrongFields([](auto& s) { s.mutable_pipeline()->add_layers_per_stage(3); }),
              ElementsAre("pipeline.layers_per_stage"));
  EXPECT_THAT(WrongFields([](auto& s) {
                s.mutable_pipeline()->add_layers_per_stage(3);
                s.mutable_pipeline()->add_layers_per_stage(0);
              }),
              IsEmpty());
}

TEST(SpecValidation, AGradientGroupHasAMicrobatch) {
  EXPECT_THAT(WrongFields([](auto& s) { s.mutable_train()->set_gradient_groups(4); }), IsEmpty());
  EXPECT_THAT(WrongFields([](auto& s) { s.mutable_train()->set_gradient_groups(5); }),
              ElementsAre("train.gradient_groups"));
}

TEST(SpecValidation, TheScheduleFitsIntoTheRun) {
  EXPECT_THAT(WrongFields([](auto& s) { s.mutable_optimizer()->mutable_schedule()->set_warmup_steps(201); }),
              ElementsAre("optimizer.schedule.warmup_steps"));
  const auto wsd = [](uint64_t warmup, uint64_t decay) {
    return WrongFields([=](auto& s) {
      auto* schedule = s.mutable_optimizer()->mutable_schedule();
      schedule->set_kind(LearningRateSchedule::KIND_WSD);
      schedule->set_warmup_steps(warmup);
      schedule->set_decay_steps(decay);
    });
  };
  EXPECT_THAT(wsd(100, 100), IsEmpty());
  EXPECT_THAT(wsd(100, 101), ElementsAre("optimizer.schedule.decay_steps"));
}

TEST(SpecValidation, GroupsMatchSomethingAndDoNotContradictThemselves) {
  EXPECT_THAT(WrongFields([](auto& s) {
                auto* nothing = s.mutable_optimizer()->add_groups();
                nothing->set_name("a");
                auto* frozen = s.mutable_optimizer()->add_groups();
                frozen->set_name("a");
                frozen->set_match("vision");
                frozen->set_frozen(true);
                frozen->set_learning_rate(-1);
              }),
              ElementsAre("optimizer.groups[0].match", "optimizer.groups[1].name", "optimizer.groups[1].learning_rate",
                          "optimizer.groups[1].frozen"));
}

TEST(SpecValidation, EvalSetsHaveNamesAndFiles) {
  EXPECT_THAT(WrongFields([](auto& s) {
                s.mutable_eval()->add_sets()->add_files("a.tar");
                s.mutable_eval()->add_sets()->set_name("b c");
                auto* empty_file = s.mutable_eval()->add_sets();
                empty_file->set_name("d");
                empty_file->add_files("");
                auto* twice = s.mutable_eval()->add_sets();
                twice->set_name("d");
                twice->add_files("a.tar");
              }),
              ElementsAre("eval.sets[0].name", "eval.sets[1].name", "eval.sets[1].files", "eval.sets[2].files[0]",
                          "eval.sets[3].name"));
}

TEST(SpecValidation, TheResumeIsNotEmpty) {
  EXPECT_THAT(WrongFields([](auto& s) { s.mutable_checkpoint()->set_resume(""); }), ElementsAre("checkpoint.resume"));
}

}  // namespace
}  // namespace moonpipe
