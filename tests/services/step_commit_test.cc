#include "services/coordinator/step_commit.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two stages with one parameter each, of norms 3 and 4; microbatches of 1 and 3 trained labels with losses 4 and 2 a
// label.
class StepCommitTest : public testing::Test {
 protected:
  StepCommitTest() {
    for (uint32_t i = 0; i < 2; ++i) {
      auto* microbatch = manifest_.add_microbatches();
      microbatch->set_index(i);
      microbatch->set_trained_labels(i == 0 ? 1 : 3);
    }
    inputs_.generation = 4;
    inputs_.step = 9;
    inputs_.manifest = &manifest_;
    inputs_.workers = {1, 2};
    inputs_.parameter_names = {"a", "b"};
    AddNorm(1, "a", 9);
    AddNorm(2, "b", 16);
    AddLoss(0, 4, 1);
    AddLoss(1, 6, 3);
  }

  worker::v1::StepReport& Report(uint32_t worker) {
    worker::v1::StepReport& report = reports_[worker];
    report.set_generation(4);
    report.set_step(9);
    return report;
  }
  void AddNorm(uint32_t worker, const std::string& name, double squared) {
    auto* norm = Report(worker).add_norms();
    norm->set_name(name);
    norm->set_squared_norm(squared);
  }
  void AddLoss(uint32_t microbatch, double sum, uint64_t labels) {
    auto* loss = Report(2).add_losses();
    loss->set_microbatch(microbatch);
    loss->set_loss_sum(sum);
    loss->set_trained_labels(labels);
  }
  void AddTiming(uint32_t worker, const std::string& action, int64_t begin, int64_t end) {
    auto* timing = Report(worker).add_timings();
    timing->set_action(action);
    timing->set_begin_us(begin);
    timing->set_end_us(end);
  }
  void ExpectError(absl::StatusCode code, const ::testing::Matcher<std::string>& message) {
    const absl::Status status = DecideStep(inputs_, reports_).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), message);
  }

  data::v1::StepManifest manifest_;
  StepInputs inputs_;
  std::map<uint32_t, worker::v1::StepReport> reports_;
};

TEST_F(StepCommitTest, NormsOfAllStagesMakeOneNormAndOneClipFactor) {
  auto decision = DecideStep(inputs_, reports_);
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_TRUE(decision->commit);
  EXPECT_EQ(decision->grad_norm, 5);
  EXPECT_EQ(decision->clip_factor, 1 / (5 + 1e-6));
  EXPECT_NEAR(decision->clip_factor, 0.2, 1e-6);
  EXPECT_EQ(decision->skip_reason, "");
}

TEST_F(StepCommitTest, TheLossIsTheMeanOverAllTrainedLabelsOfTheStep) {
  auto decision = DecideStep(inputs_, reports_);
  ASSERT_TRUE(decision.ok());
  EXPECT_EQ(decision->loss, 2.5);
  EXPECT_EQ(decision->trained_labels, 4U);
}

TEST_F(StepCommitTest, SmallNormsAndALimitOfZeroDoNotClip) {
  inputs_.max_grad_norm = 100;
  EXPECT_EQ(DecideStep(inputs_, reports_)->clip_factor, 1);
  inputs_.max_grad_norm = 0;
  EXPECT_EQ(DecideStep(inputs_, reports_)->clip_factor, 1);
}

TEST_F(StepCommitTest, TheSumFollowsTheListAndNotTheSplit) {
  // In double, one and then four times 2^-53 stays one; four times 2^-53 first and then one is more. Every split and
  // every order of reports must give the order of the list.
  const double tiny = std::ldexp(1.0, -53);
  inputs_.parameter_names = {"one", "w", "x", "y", "z"};
  const auto norm_of = [&](const std::vector<std::pair<uint32_t, std::string>>& owners) {
    for (auto& [worker, report] : reports_) report.clear_norms();
    for (const auto& [worker, name] : owners) AddNorm(worker, name, name == "one" ? 1 : tiny);
    return DecideStep(inputs_, reports_)->grad_norm;
  };
  EXPECT_EQ(norm_of({{1, "one"}, {1, "w"}, {1, "x"}, {2, "y"}, {2, "z"}}), 1);
  EXPECT_EQ(norm_of({{1, "z"}, {1, "x"}, {1, "y"}, {1, "w"}, {2, "one"}}), 1);
  EXPECT_EQ(norm_of({{2, "y"}, {2, "one"}, {2, "x"}, {1, "z"}, {2, "w"}}), 1);
  inputs_.parameter_names = {"w", "x", "y", "z", "one"};
  EXPECT_GT(norm_of({{1, "one"}, {1, "w"}, {1, "x"}, {2, "y"}, {2, "z"}}), 1);
}

TEST_F(StepCommitTest, AStepWithoutALabelIsSkippedAsEmpty) {
  for (auto& microbatch : *manifest_.mutable_microbatches()) microbatch.set_trained_labels(0);
  Report(2).clear_losses();
  AddLoss(0, 0, 0);
  AddLoss(1, 0, 0);
  auto decision = DecideStep(inputs_, reports_);
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_FALSE(decision->commit);
  EXPECT_EQ(decision->skip_reason, "empty");
  EXPECT_EQ(decision->loss, 0);
}

TEST_F(StepCommitTest, OneMaskedMicrobatchChangesNothing) {
  auto* microbatch = manifest_.add_microbatches();
  microbatch->set_index(2);
  AddLoss(2, 0, 0);
  auto decision = DecideStep(inputs_, reports_);
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->loss, 2.5);
}

TEST_F(StepCommitTest, AnythingThatIsNotFiniteSkipsTheStep) {
  for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    Report(1).mutable_norms(0)->set_squared_norm(bad);
    EXPECT_EQ(DecideStep(inputs_, reports_)->skip_reason, "not_finite");
    EXPECT_FALSE(DecideStep(inputs_, reports_)->commit);
    Report(1).mutable_norms(0)->set_squared_norm(9);
    Report(2).mutable_losses(1)->set_loss_sum(bad);
    EXPECT_EQ(DecideStep(inputs_, reports_)->skip_reason, "not_finite");
    Report(2).mutable_losses(1)->set_loss_sum(6);
  }
  EXPECT_TRUE(DecideStep(inputs_, reports_)->commit);
}

TEST_F(StepCommitTest, ReportsOfAnotherGenerationOrStepAreRefusedWithBothNumbers) {
  Report(1).set_generation(3);
  reports_[1].set_generation(3);
  ExpectError(absl::StatusCode::kAborted, AllOf(HasSubstr("worker 1"), HasSubstr("generation 3"), HasSubstr("4")));
  reports_[1].set_generation(4);
  reports_[1].set_step(8);
  ExpectError(absl::StatusCode::kAborted, AllOf(HasSubstr("worker 1"), HasSubstr("step 8"), HasSubstr("step 9")));
}

TEST_F(StepCommitTest, MissingAndUnexpectedWorkersAreNamed) {
  inputs_.workers = {1, 2, 3};
  ExpectError(absl::StatusCode::kFailedPrecondition,
              AllOf(HasSubstr("worker 3 has not reported"), HasSubstr("2 of 3")));
  inputs_.workers = {2};
  ExpectError(absl::StatusCode::kFailedPrecondition, HasSubstr("worker 1 reports step 9 but has no part"));
}

TEST_F(StepCommitTest, EveryParameterIsCountedExactlyOnceAndNamedIfNot) {
  AddNorm(2, "a", 1);
  ExpectError(absl::StatusCode::kInvalidArgument,
              AllOf(HasSubstr("norm of a is reported twice"), HasSubstr("worker 2")));
  Report(2).mutable_norms()->RemoveLast();
  inputs_.parameter_names.push_back("c");
  ExpectError(absl::StatusCode::kInvalidArgument, HasSubstr("nobody reports the norm of c"));
  inputs_.parameter_names = {"a"};
  ExpectError(absl::StatusCode::kInvalidArgument, HasSubstr("norm of b, which is not a trained parameter"));
  inputs_.parameter_names = {"a", "b"};
  Report(1).mutable_norms(0)->set_squared_norm(-1);
  ExpectError(absl::StatusCode::kInvalidArgument, HasSubstr("squared norm -1 of a"));
}

TEST_F(StepCommitTest, EveryMicrobatchLossIsThereOnceAndCountsTheLabelsOfTheManifest) {
  AddLoss(1, 6, 3);
  ExpectError(absl::StatusCode::kInvalidArgument, HasSubstr("microbatch 1 is reported twice"));
  Report(2).mutable_losses()->RemoveLast();
  AddLoss(7, 6, 3);
  ExpectError(absl::StatusCode::kInvalidArgument, HasSubstr("microbatch 7, the step has 2"));
  Report(2).mutable_losses()->RemoveLast();
  Report(2).mutable_losses(1)->set_trained_labels(2);
  ExpectError(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("trained 2 labels"), HasSubstr("has 3")));
  Report(2).mutable_losses()->RemoveLast();
  ExpectError(absl::StatusCode::kInvalidArgument, HasSubstr("nobody reports the loss of microbatch 1"));
}

TEST_F(StepCommitTest, ExpertCountsAreSummedByLayer) {
  const auto add = [&](uint32_t worker, uint32_t layer, std::vector<uint64_t> counts) {
    auto* entry = Report(worker).add_expert_counts();
    entry->set_layer(layer);
    for (uint64_t count : counts) entry->add_counts(count);
  };
  add(2, 3, {1, 2});
  add(1, 1, {5, 0});
  add(1, 3, {10, 20});
  auto decision = DecideStep(inputs_, reports_);
  ASSERT_TRUE(decision.ok());
  ASSERT_EQ(decision->expert_counts.size(), 2U);
  EXPECT_EQ(decision->expert_counts[0].layer(), 1U);
  EXPECT_THAT(decision->expert_counts[0].counts(), ElementsAre(5, 0));
  EXPECT_THAT(decision->expert_counts[1].counts(), ElementsAre(11, 22));
  add(1, 1, {1});
  ExpectError(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("1 experts in layer 1"), HasSubstr("2")));
}

TEST_F(StepCommitTest, LargestLogitsAreTheMaximumOverTheWorkersByHead) {
  const auto add = [&](uint32_t worker, uint32_t layer, std::vector<double> logits) {
    auto* entry = Report(worker).add_largest_logits();
    entry->set_layer(layer);
    for (double logit : logits) entry->add_logits(logit);
  };
  add(2, 3, {1, 120});
  add(1, 1, {-5, 0});
  add(1, 3, {10, 20});
  Report(1).set_balance_loss(0.25);
  Report(2).set_balance_loss(0.5);
  auto decision = DecideStep(inputs_, reports_);
  ASSERT_TRUE(decision.ok());
  ASSERT_EQ(decision->largest_logits.size(), 2U);
  EXPECT_EQ(decision->largest_logits[0].layer(), 1U);
  EXPECT_THAT(decision->largest_logits[0].logits(), ElementsAre(-5, 0));
  EXPECT_THAT(decision->largest_logits[1].logits(), ElementsAre(10, 120));
  EXPECT_EQ(decision->balance_loss, 0.75);
  add(1, 1, {1});
  ExpectError(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("1 heads in layer 1"), HasSubstr("2")));
}

TEST_F(StepCommitTest, TheBubbleIsTheIdlePartOfTheDecoderStages) {
  EXPECT_EQ(DecideStep(inputs_, reports_)->bubble_ratio, 0);
  AddTiming(1, "0F0", 0, 40);
  AddTiming(1, "0SA0", 40, 45);
  AddTiming(1, "0RG0", 45, 90);  // waiting is no work
  AddTiming(1, "0B0", 90, 100);
  AddTiming(2, "1RA0", 0, 50);
  AddTiming(2, "1F0", 50, 60);
  AddTiming(2, "1B0", 60, 80);
  EXPECT_DOUBLE_EQ(DecideStep(inputs_, reports_)->bubble_ratio, 1 - (50 + 30) / 200.0);
  // The encoder's work is no work of a decoder stage, but it makes the step longer.
  inputs_.workers.push_back(3);
  AddTiming(3, "VF0", -100, 0);
  EXPECT_DOUBLE_EQ(DecideStep(inputs_, reports_)->bubble_ratio, 1 - 80 / 400.0);
}

TEST_F(StepCommitTest, TheLargestWorkerTellsThePeak) {
  Report(1).set_peak_memory_bytes(10);
  Report(2).set_peak_memory_bytes(30);
  EXPECT_EQ(DecideStep(inputs_, reports_)->peak_memory_bytes, 30U);
}

}  // namespace
}  // namespace moonpipe
