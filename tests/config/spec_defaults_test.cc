#include <fstream>
#include <regex>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "moonpipe/config/run_file.h"
#include "tests/config/good_run.h"

namespace moonpipe {
namespace {

using cluster::v1::LearningRateSchedule;
using cluster::v1::TrainingRunSpec;
using google::protobuf::Descriptor;

// Every `(default X)` of the schema's comments: Message.field -> X.
std::map<std::string, std::string> DocumentedDefaults() {
  std::ifstream proto(std::string(SOURCE_DIR) + "/protos/moonpipe/cluster/v1/training_run_spec.proto");
  EXPECT_TRUE(proto.good());
  std::map<std::string, std::string> defaults;
  std::string line, message, comment;
  const std::regex message_line("^message (\\w+) \\{"), field_line("^  optional [\\w.]+ (\\w+) = "),
      comment_line("^  // (.*)");
  const std::regex in_parentheses("\\(default ([^;:,)]+)"), before_parenthesis("([^ ]+) \\(default\\)");
  std::smatch match;
  while (std::getline(proto, line)) {
    if (std::regex_search(line, match, message_line)) {
      message = match[1];
    } else if (std::regex_search(line, match, comment_line)) {
      comment += match[1].str() + " ";
    } else {
      if (std::regex_search(line, match, field_line)) {
        const std::string field = match[1];
        if (std::regex_search(comment, match, in_parentheses) ||
            std::regex_search(comment, match, before_parenthesis)) {
          defaults[absl::StrCat(message, ".", field)] = match[1];
        }
      }
      comment.clear();
    }
  }
  return defaults;
}

std::string AsWritten(const TrainingRunSpec& spec, const std::string& message, const std::string& field) {
  const std::map<std::string, std::string> section = {{"ModelSpec", "model"},
                                                      {"DataSpec", "data"},
                                                      {"PipelineSpec", "pipeline"},
                                                      {"VisionSpec", "vision"},
                                                      {"TrainSpec", "train"},
                                                      {"OptimizerSpec", "optimizer"},
                                                      {"LearningRateSchedule", "  schedule"},
                                                      {"CheckpointSpec", "checkpoint"},
                                                      {"EvalSpec", "eval"},
                                                      {"RuntimeSpec", "runtime"}};
  const std::string yaml = WriteYaml(spec);
  const size_t begin = yaml.find(section.at(message) + ":\n");
  if (begin == std::string::npos) return "absent section";
  // A field stands two columns right of its section's name.
  const std::string line = absl::StrCat("\n", std::string(section.at(message).find_first_not_of(' ') + 2, ' '), field, ": ");
  const size_t at = yaml.find(line, begin);
  if (at == std::string::npos) return "absent field";
  const size_t value = at + line.size();
  return yaml.substr(value, yaml.find('\n', value) - value);
}

TEST(SpecDefaults, AreThoseThatTheSchemaNames) {
  const auto documented = DocumentedDefaults();
  EXPECT_GE(documented.size(), 25u);
  TrainingRunSpec spec;
  ResolveDefaults(&spec);
  const std::map<std::string, std::string> in_words = {{"1 GiB", "1073741824"}, {"1e-8", "1e-08"}};
  for (const auto& [name, value] : documented) {
    const std::string message = name.substr(0, name.find('.')), field = name.substr(name.find('.') + 1);
    // These depend on other fields; the tests below have them.
    if (name == "LearningRateSchedule.decay_steps" || message == "ParameterGroup") continue;
    const auto number = in_words.find(value);
    EXPECT_EQ(AsWritten(spec, message, field), number == in_words.end() ? value : number->second) << name;
  }
}

TEST(SpecDefaults, TheDecayOfWsdIsAFifthOfTheSteps) {
  TrainingRunSpec spec;
  spec.mutable_train()->set_steps(203);
  spec.mutable_optimizer()->mutable_schedule()->set_kind(LearningRateSchedule::KIND_WSD);
  ResolveDefaults(&spec);
  EXPECT_EQ(spec.optimizer().schedule().decay_steps(), 40u);
}

TEST(SpecDefaults, ACosineHasNoDecaySteps) {
  TrainingRunSpec spec;
  spec.mutable_train()->set_steps(200);
  ResolveDefaults(&spec);
  EXPECT_FALSE(spec.optimizer().schedule().has_decay_steps());
}

TEST(SpecDefaults, AGroupIsCalledAsItMatches) {
  TrainingRunSpec spec;
  spec.mutable_optimizer()->add_groups()->set_match("vision");
  ResolveDefaults(&spec);
  EXPECT_EQ(spec.optimizer().groups(0).name(), "vision");
  EXPECT_FALSE(spec.optimizer().groups(0).has_learning_rate());
}

TEST(SpecDefaults, KeepWhatWasSaid) {
  TrainingRunSpec spec;
  spec.mutable_train()->set_max_grad_norm(0);
  spec.mutable_pipeline()->set_stages(4);
  spec.mutable_train()->set_step_idle_parts(false);
  ResolveDefaults(&spec);
  EXPECT_EQ(spec.train().max_grad_norm(), 0);
  EXPECT_EQ(spec.pipeline().stages(), 4u);
  EXPECT_FALSE(spec.train().step_idle_parts());
}

TEST(SpecDefaults, AreFilledOnlyOnce) {
  auto spec = ParseRunFile(kGoodRun, "run.yaml", "/run");
  ASSERT_TRUE(spec.ok());
  TrainingRunSpec again = *spec;
  ResolveDefaults(&again);
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(*spec, again));
}

}  // namespace
}  // namespace moonpipe
