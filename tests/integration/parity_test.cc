// `moonpipe parity`: recordings of the reference implementations through the services, on any number of stages, and that the command
// notices each mistake that it is there to find.
#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/spec/safetensors.h"
#include "tests/integration/tiny.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

std::string FixtureFolder(const std::string& name) { return std::string(SOURCE_DIR) + "/tests/fixtures/" + name; }

ProgramResult RunParity(const std::string& folder, std::vector<std::string> arguments, const std::string& fault = "") {
  arguments.insert(arguments.begin(), {"parity", folder});
  std::vector<std::pair<std::string, std::string>> environment;
  if (!fault.empty()) environment.emplace_back("MOONPIPE_TEST_FAULT", fault);
  return RunProgram("moonpipe", arguments, environment);
}

nlohmann::json Parse(const ProgramResult& result) {
  const nlohmann::json json = nlohmann::json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(json.is_discarded()) << result.out << result.err;
  return json;
}

// The largest difference of a group of a case.
double Largest(const nlohmann::json& result, const std::string& batch_case, const std::string& group) {
  for (const auto& one : result["cases"]) {
    if (one["case"] != batch_case) continue;
    for (const auto& entry : one["groups"]) {
      if (entry["name"] == group) return entry["largest_difference"];
    }
  }
  ADD_FAILURE() << "no group " << group << " in case " << batch_case;
  return -1;
}

void ExpectAgreement(const std::string& fixture, const std::vector<std::string>& cases, std::vector<std::string> arguments) {
  arguments.push_back("--json");
  const ProgramResult result = RunParity(FixtureFolder(fixture), arguments);
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  const nlohmann::json json = Parse(result);
  EXPECT_TRUE(json["passed"]);
  std::vector<std::string> seen;
  for (const auto& one : json["cases"]) {
    seen.push_back(one["case"]);
    EXPECT_EQ(one["failures"].size(), 0u);
    EXPECT_GT(one["groups"].size(), 10u);
  }
  EXPECT_EQ(seen, cases);
}

const std::vector<std::string> kVlCases = {"packed", "text_only", "two_images"};

TEST(ParityCommandTest, KimiVlAgreesOnTwoStages) { ExpectAgreement("kimi_vl_a3b", kVlCases, {"--stages", "2"}); }
TEST(ParityCommandTest, KimiVlAgreesOnFourStagesWithTwoMicrobatches) {
  ExpectAgreement("kimi_vl_a3b", kVlCases, {"--stages", "4", "--microbatches", "2"});
}
TEST(ParityCommandTest, MoonlightAgreesOnOneStageWithTwoMicrobatches) {
  ExpectAgreement("moonlight", {"packed", "padded"}, {"--stages", "1", "--microbatches", "2", "--schedule", "gpipe"});
}
TEST(ParityCommandTest, K25AgreesOnTwoStages) {
  ExpectAgreement("kimi_k2_5", {"packed", "text_only", "two_images", "video"}, {"--stages", "2"});
}
TEST(ParityCommandTest, K25ClipsAgreeWithTheTowerInTheFirstStage) {
  ExpectAgreement("kimi_k2_5", {"video"}, {"--case", "video", "--stages", "1", "--set", "vision.placement=first_stage"});
}

TEST(ParityCommandTest, PinnedRoutingAgreesToo) {
  ExpectAgreement("moonlight", {"padded"}, {"--case", "padded", "--stages", "2", "--pin-routing", "--microbatches", "2"});
}

TEST(ParityCommandTest, NumbersThatDoNotFitAreRefusedWithBoth) {
  const ProgramResult stages = RunParity(FixtureFolder("moonlight"), {"--stages", "5"});
  EXPECT_EQ(stages.exit_code, 1);
  EXPECT_THAT(stages.err, AllOf(HasSubstr("--stages 5"), HasSubstr("4 decoder layers")));
  const ProgramResult microbatches = RunParity(FixtureFolder("moonlight"), {"--microbatches", "3"});
  EXPECT_EQ(microbatches.exit_code, 1);
  EXPECT_THAT(microbatches.err, AllOf(HasSubstr("3 microbatches"), HasSubstr("2 rows")));
  EXPECT_THAT(RunParity(FixtureFolder("moonlight"), {"--case", "video"}).err, AllOf(HasSubstr("video"), HasSubstr("packed, padded")));
}

// Each fault and where it must show first.
struct Fault {
  const char* name;
  const char* fixture;
  const char* batch_case;
  const char* group;
};
class ParityFaultTest : public ::testing::TestWithParam<Fault> {};

TEST_P(ParityFaultTest, IsNoticed) {
  const Fault& fault = GetParam();
  const ProgramResult result =
      RunParity(FixtureFolder(fault.fixture), {"--case", fault.batch_case, "--stages", "1", "--set", "vision.placement=first_stage", "--json"}, fault.name);
  EXPECT_EQ(result.exit_code, 1) << result.out;
  EXPECT_THAT(result.err, HasSubstr("differ from their recording"));
  const nlohmann::json json = Parse(result);
  EXPECT_FALSE(json["passed"]);
  EXPECT_GT(Largest(json, fault.batch_case, fault.group), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Faults, ParityFaultTest,
                         ::testing::Values(Fault{"patch-pair-order", "kimi_vl_a3b", "two_images", "vision tower"},
                                           Fault{"erf-gelu", "kimi_vl_a3b", "two_images", "vision tower"},
                                           Fault{"no-mscale", "kimi_k2_5", "two_images", "layer 0"},
                                           Fault{"cubic-constant", "kimi_vl_a3b", "two_images", "vision tower"},
                                           Fault{"no-document-mask", "moonlight", "packed", "layer 0"}),
                         [](const auto& instance) {
                           std::string name = instance.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// A copy of a fixture whose recording is changed.
std::string ChangedFixture(const std::string& name, const std::function<void(std::vector<StoredTensor>&)>& change) {
  const std::string folder = FreshFolder(name);
  for (const char* file : {"config.json", "model.safetensors", "meta.json"}) {
    std::filesystem::copy_file(FixtureFolder("moonlight") + "/" + file, folder + "/" + file);
  }
  const absl::StatusOr<SafetensorsFile> recording = SafetensorsFile::Open(FixtureFolder("moonlight") + "/io.safetensors");
  EXPECT_TRUE(recording.ok()) << recording.status();
  std::vector<StoredTensor> tensors = recording->tensors();
  change(tensors);
  EXPECT_TRUE(WriteSafetensors(folder + "/io.safetensors", tensors).ok());
  return folder;
}

TEST(ParityCommandTest, ATensorThatWasNotProducedOrHasAnotherShapeFails) {
  const std::vector<float> zeros(128 * 64);
  const std::string folder = ChangedFixture("changed", [&](std::vector<StoredTensor>& tensors) {
    // A tensor that no service computes, and the last hidden state with half of its width.
    tensors.push_back({"padded/out/layers.9", StoredType::kF32, {2, 64, 64}, zeros.data()});
    for (StoredTensor& tensor : tensors) {
      if (tensor.name == "padded/out/norm") tensor.shape = {2, 64, 32};
    }
  });
  const ProgramResult result = RunParity(folder, {"--case", "padded", "--stages", "1", "--json"});
  EXPECT_EQ(result.exit_code, 1);
  const nlohmann::json json = Parse(result);
  const std::vector<std::string> failures = json["cases"][0]["failures"];
  EXPECT_THAT(failures, testing::UnorderedElementsAre(HasSubstr("out/layers.9: is recorded and was not produced"),
                                                      AllOf(HasSubstr("out/norm: has the shape"), HasSubstr("32] was expected"))));
}

TEST(ParityCommandTest, AnotherCaseWithoutMaskPositionsAndLabelsRuns) {
  // Only what a batch must have; everything else takes its default, and there is nothing recorded to differ from.
  const std::string folder = ChangedFixture("bare", [](std::vector<StoredTensor>& tensors) {
    std::vector<StoredTensor> kept;
    for (StoredTensor tensor : tensors) {
      if (tensor.name != "padded/in/input_ids") continue;
      tensor.name = "bare/in/input_ids";
      kept.push_back(tensor);
    }
    tensors = kept;
  });
  const ProgramResult result = RunParity(folder, {"--stages", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("1 cases with 0 tensors agree"));
}

}  // namespace
}  // namespace moonpipe
