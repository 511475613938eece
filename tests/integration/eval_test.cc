// Held-out sets answered by greedy decoding through the services: the layout of the cluster must not show in the answers, and every
// stage must have had its part in them.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "tests/integration/tiny.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// The first `samples` samples of a shard, written to `path`.
std::string CutShard(const std::string& shard, int samples, const std::string& path) {
  const absl::StatusOr<std::string> bytes = ReadFile(shard);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  size_t end = 0;
  std::set<std::string> keys;
  while (end + 512 <= bytes->size()) {
    const std::string name = bytes->substr(end, bytes->find('\0', end) - end);
    keys.insert(name.substr(0, name.find('.')));
    if (static_cast<int>(keys.size()) > samples) break;
    end += 512 + (std::stoul(bytes->substr(end + 124, 11), nullptr, 8) + 511) / 512 * 512;
  }
  EXPECT_TRUE(WriteFileAtomically(path, bytes->substr(0, end) + std::string(1024, '\0')).ok());
  return path;
}

class EvalTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    run_ = new TinyRun(WriteTinyRun("eval", TinyConfig()));
    // Long enough that answers differ from picture to picture; with fresh weights all are alike, and comparing them would say little.
    trained_ = new TrainResult(
        RunTrain(*run_, "trained", {"train.steps=150", "pipeline.microbatch_tokens=512", "optimizer.learning_rate=1e-2"}));
    one_ = CutShard(SOURCE_DIR "/examples/digits/heldout-one.tar", 30, run_->folder + "/heldout-one.tar");
    two_ = CutShard(SOURCE_DIR "/examples/digits/heldout-two.tar", 30, run_->folder + "/heldout-two.tar");
  }
  void SetUp() override { ASSERT_EQ(trained_->exit_code, 0) << trained_->err; }

  static ProgramResult Eval(const std::vector<std::string>& overrides, const std::string& temp) {
    std::vector<std::string> arguments = {"eval", trained_->run_folder, one_, two_, "--json", "--set", "eval.max_answer_tokens=6"};
    for (const std::string& text : overrides) arguments.insert(arguments.end(), {"--set", text});
    return RunProgram("moonpipe", arguments, {{"TMPDIR", temp}});
  }
  // The answers on two stages with an encoder.
  static const ProgramResult& TwoStages() {
    static const ProgramResult result = Eval({"pipeline.stages=2"}, FreshFolder("eval-two"));
    return result;
  }

  static TinyRun* run_;
  static TrainResult* trained_;
  static std::string one_, two_;
};
TinyRun* EvalTest::run_ = nullptr;
TrainResult* EvalTest::trained_ = nullptr;
std::string EvalTest::one_, EvalTest::two_;

TEST_F(EvalTest, AnswersEverySampleOfBothSetsPlainAndUnderEveryControl) {
  ASSERT_EQ(TwoStages().exit_code, 0) << TwoStages().err;
  const auto results = nlohmann::json::parse(TwoStages().out);
  std::vector<std::string> kinds;
  for (const auto& result : results) {
    kinds.push_back(absl::StrCat(result["set"].get<std::string>(), " ", result["control"].get<std::string>()));
    EXPECT_EQ(result["samples"], 30) << kinds.back();
    EXPECT_THAT(result["answers"], SizeIs(30)) << kinds.back();
  }
  EXPECT_THAT(kinds, testing::ElementsAre("heldout-one none", "heldout-one zero-features", "heldout-two none", "heldout-two zero-features",
                                          "heldout-two swap-pictures"));
  // The answers tell pictures apart, and without features they cannot.
  const auto& plain = results[0]["answers"];
  EXPECT_GT(std::set<std::string>(plain.begin(), plain.end()).size(), 3U);
  const auto& blind = results[1]["answers"];
  EXPECT_LT(std::set<std::string>(blind.begin(), blind.end()).size(), std::set<std::string>(plain.begin(), plain.end()).size());
  EXPECT_NE(results[2]["answers"], results[4]["answers"]);
}

TEST_F(EvalTest, OneStageGivesTheAnswersOfTwo) {
  const ProgramResult one = Eval({"pipeline.stages=1"}, FreshFolder("eval-one"));
  ASSERT_EQ(one.exit_code, 0) << one.err;
  EXPECT_EQ(one.out, TwoStages().out);
}

TEST_F(EvalTest, ATowerInTheFirstStageGivesTheAnswersOfAService) {
  const ProgramResult first = Eval({"vision.placement=first_stage"}, FreshFolder("eval-first"));
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(first.out, TwoStages().out);
}

// Values of a metric's lines that have `label`, summed; negative where there is none.
double Sum(const std::string& page, const std::string& metric, const std::string& label) {
  double sum = -1;
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    double value = 0;
    if (!absl::StartsWith(line, metric + "{") || !absl::StrContains(line, label)) continue;
    if (absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) sum = std::max(sum, 0.0) + value;
  }
  return sum;
}

TEST_F(EvalTest, FourStagesGiveTheAnswersOfTwoAndEachCountsItsMicrobatches) {
  const std::string temp = FreshFolder("eval-four");
  std::atomic<bool> ended = false;
  ProgramResult four;
  std::thread program([&] {
    four = Eval({"pipeline.stages=4"}, temp);
    ended = true;
  });
  // While it runs: the pages that services.json names, again and again.
  std::map<std::string, std::vector<double>> eval, train;
  std::map<std::string, int64_t> pids;
  while (!ended) {
    std::string services_file;
    std::error_code vanishing;
    for (std::filesystem::recursive_directory_iterator it(temp, vanishing), end; !vanishing && it != end; it.increment(vanishing)) {
      if (it->path().filename() == "services.json") services_file = it->path().string();
    }
    const absl::StatusOr<std::string> text = ReadFile(services_file);
    if (text.ok()) {
      for (const auto& service : nlohmann::json::parse(*text)) {
        const std::string name = service["name"];
        pids[name] = service["pid"];
        const std::string page = FetchPage(service["metrics_address"], "/metrics");
        const double value = Sum(page, "moonpipe_stage_microbatches_total", "mode=\"eval\"");
        if (value >= 0) eval[name].push_back(value);
        if (value >= 0) train[name].push_back(Sum(page, "moonpipe_stage_microbatches_total", "mode=\"train\""));
      }
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  program.join();
  ASSERT_EQ(four.exit_code, 0) << four.err;
  EXPECT_EQ(four.out, TwoStages().out);
  std::set<int64_t> different;
  for (const std::string name : {"coordinator", "dataloader", "vision-encoder", "decoder-stage-0", "decoder-stage-1", "decoder-stage-2", "decoder-stage-3"}) {
    ASSERT_TRUE(pids.contains(name)) << name << " is not in services.json";
    different.insert(pids[name]);
  }
  EXPECT_EQ(different.size(), pids.size());
  for (const std::string name : {"vision-encoder", "decoder-stage-0", "decoder-stage-1", "decoder-stage-2", "decoder-stage-3"}) {
    ASSERT_FALSE(eval[name].empty()) << name << " shows no counter";
    EXPECT_TRUE(std::is_sorted(eval[name].begin(), eval[name].end())) << name;
    EXPECT_GT(eval[name].back(), eval[name].front()) << name;
    EXPECT_EQ(train[name].back(), 0) << name;
  }
  // Nothing is left of an evaluation.
  EXPECT_TRUE(std::filesystem::is_empty(temp) || std::filesystem::is_empty(std::filesystem::directory_iterator(temp)->path()));
}

TEST_F(EvalTest, AFolderThatIsNoRunIsRefusedWithWhatWasLookedFor) {
  const ProgramResult refused = RunProgram("moonpipe", {"eval", run_->folder});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, AllOf(HasSubstr(run_->folder), HasSubstr("checkpoints/")));
}

}  // namespace
}  // namespace moonpipe
