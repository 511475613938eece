#include "services/coordinator/run_files.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::UnorderedElementsAre;

worker::v1::StepReport ReportOf(const std::vector<std::string>& actions, int64_t begin_us) {
  worker::v1::StepReport report;
  for (const std::string& action : actions) {
    worker::v1::ActionTiming& timing = *report.add_timings();
    timing.set_action(action);
    timing.set_begin_us(begin_us);
    timing.set_end_us(begin_us += 10);
  }
  return report;
}

std::vector<std::string> KeysOf(const nlohmann::ordered_json& object) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.push_back(key);
  return keys;
}

TEST(TraceTest, HasOneRowAServiceAndTakesItsClockOffsetOut) {
  Trace trace(3);
  trace.Add(7, "decoder stage 10", absl::Microseconds(500), ReportOf({"10RA0", "10F0", "10SA0"}, 1500));
  trace.Add(7, "decoder stage 9", absl::ZeroDuration(), ReportOf({"9F0"}, 1020));
  trace.Add(7, "vision encoder", absl::ZeroDuration(), ReportOf({"VF0"}, 1005));
  trace.AddStep(7, absl::FromUnixMicros(990), absl::FromUnixMicros(1100));
  const json parsed = json::parse(trace.ToJson());
  std::vector<std::string> rows;
  std::map<std::string, json> spans;
  for (const json& event : parsed.at("traceEvents")) {
    if (event.at("name") == "thread_name") rows.push_back(event.at("args").at("name"));
    if (event.at("ph") == "X") spans[event.at("name")] = event;
  }
  EXPECT_THAT(rows, ElementsAre("coordinator", "vision encoder", "decoder stage 9", "decoder stage 10"));
  EXPECT_EQ(spans.at("step 7").at("ts"), 0);
  EXPECT_EQ(spans.at("step 7").at("dur"), 110);
  EXPECT_EQ(spans.at("10F0").at("ts"), 20) << "1510 by a clock that is 500 ahead";
  EXPECT_EQ(spans.at("10F0").at("cat"), "compute");
  EXPECT_EQ(spans.at("10RA0").at("cat"), "receive");
  EXPECT_EQ(spans.at("10SA0").at("cat"), "send");
  EXPECT_EQ(spans.at("VF0").at("args").at("step"), 7);
}

TEST(TraceTest, KeepsTheLastSteps) {
  Trace trace(2);
  for (uint64_t step = 1; step <= 4; ++step) trace.Add(step, "decoder stage 0", absl::ZeroDuration(), ReportOf({"0F0"}, 1000));
  std::vector<uint64_t> steps;
  const json parsed = json::parse(trace.ToJson());
  for (const json& event : parsed.at("traceEvents")) {
    if (event.at("ph") == "X") steps.push_back(event.at("args").at("step"));
  }
  EXPECT_THAT(steps, ElementsAre(3, 4));
}

TEST(TraceTest, WithoutAStepIsStillJson) { EXPECT_TRUE(json::parse(Trace(3).ToJson()).at("traceEvents").empty()); }

cluster::v1::EvalResult ResultOf(const std::string& set, const std::string& control, uint64_t correct, const std::vector<std::string>& answers) {
  cluster::v1::EvalResult result;
  result.set_set(set);
  result.set_control(control);
  result.set_samples(answers.size());
  result.set_correct(correct);
  for (const std::string& answer : answers) result.add_answers(answer);
  return result;
}

TEST(RunReportTest, HoldsAccuraciesBySetAndWhatTheControlsChanged) {
  RunReport report;
  report.steps = 20;
  report.training_seconds = 4;
  report.mfu = 0.25;
  report.evals = {ResultOf("heldout-one", "none", 3, {"1", "2", "3", "4"}), ResultOf("heldout-one", "zero-features", 1, {"1", "1", "1", "1"}),
                  ResultOf("heldout-two", "none", 4, {"1", "2", "3", "4"}), ResultOf("heldout-two", "swap-pictures", 0, {"2", "1", "4", "3"})};
  const auto parsed = nlohmann::ordered_json::parse(report.ToJson());
  EXPECT_THAT(KeysOf(parsed), UnorderedElementsAre("heldout_one", "heldout_two", "steps", "training_seconds", "wall_seconds", "tokens_per_second",
                                                   "images_per_second", "final_loss", "mfu", "controls"));
  EXPECT_EQ(parsed.at("heldout_one"), 0.75);
  EXPECT_EQ(parsed.at("heldout_two"), 1.0);
  EXPECT_EQ(parsed.at("mfu"), 0.25);
  EXPECT_EQ(parsed.at("controls").at("zero-features").at("heldout_one").at("accuracy"), 0.25);
  EXPECT_EQ(parsed.at("controls").at("zero-features").at("heldout_one").at("changed"), 0.75);
  EXPECT_EQ(parsed.at("controls").at("swap-pictures").at("heldout_two").at("changed"), 1.0);
}

TEST(RunReportTest, AnUnknownMfuIsNull) { EXPECT_TRUE(json::parse(RunReport().ToJson()).at("mfu").is_null()); }

TEST(ServicesTest, NamesRolesAndAddresses) {
  const ServiceEntry stage{"decoder-stage-1", "decoder-stage", 1, "127.0.0.1:1", "127.0.0.1:2", "here", 42};
  EXPECT_EQ(json::parse(ServicesJson({stage})),
            json::parse(R"([{"name": "decoder-stage-1", "role": "decoder-stage", "ordinal": 1, "address": "127.0.0.1:1",
                             "metrics_address": "127.0.0.1:2", "host": "here", "pid": 42}])"));
}

TEST(MetricsLogTest, AppendsOneWholeLineAStep) {
  const std::string path = testing::TempDir() + "/metrics_log_test.jsonl";
  ASSERT_TRUE(WriteFileAtomically(path, "").ok());
  for (uint64_t step = 1; step <= 2; ++step) {
    cluster::v1::StepEvent event;
    event.set_step(step);
    event.set_loss(0.1 + 0.2);
    event.set_model_flops(12345678901234567.0);
    if (step == 2) event.set_skip_reason("not_finite");
    MetricsLog(path).Append(event);
  }
  const std::string text = *ReadFile(path);
  const size_t newline = text.find('\n');
  const json first = json::parse(text.substr(0, newline)), second = json::parse(text.substr(newline + 1));
  EXPECT_EQ(first.at("loss").get<double>(), 0.1 + 0.2) << "every digit that is needed to read the same number";
  EXPECT_EQ(first.at("model_flops").get<double>(), 12345678901234567.0);
  EXPECT_FALSE(first.contains("mfu"));
  EXPECT_FALSE(first.contains("skip_reason"));
  EXPECT_EQ(second.at("skip_reason"), "not_finite");
}

}  // namespace
}  // namespace moonpipe
