// `moonpipe parity` on the recordings of Kimi K2.5, and on recordings that the services cannot match.
#include <filesystem>
#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/spec/safetensors.h"
#include "tests/integration/parity_runs.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ParityCommandTest, K25AgreesOnTwoStagesWithTwoMicrobatches) {
  ExpectAgreement("kimi_k2_5", {"packed", "text_only", "two_images", "video"}, {"--stages", "2", "--microbatches", "2"});
}
TEST(ParityCommandTest, K25ClipsAgreeWithTheTowerInTheFirstStage) {
  ExpectAgreement("kimi_k2_5", {"video"}, {"--case", "video", "--stages", "1", "--set", "vision.placement=first_stage"});
}

TEST(ParityCommandTest, PinnedRoutingAgreesToo) {
  ExpectAgreement("moonlight", {"padded"}, {"--case", "padded", "--stages", "2", "--pin-routing", "--microbatches", "2"});
}

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

TEST(ParityCommandTest, ABatchThatStartsFromTheRecordedEmbeddingsAgrees) {
  const std::string folder = ChangedFixture("embeddings", [](std::vector<StoredTensor>& tensors) {
    std::vector<StoredTensor> kept;
    for (StoredTensor tensor : tensors) {
      const std::string& name = tensor.name;
      // The token embedding has no part in it, so what follows from its gradient is another.
      if (name == "padded/in/input_ids" || name == "padded/grad_norms" || absl::StrContains(name, "/adamw/") || absl::StrContains(name, "embed_tokens")) continue;
      if (absl::StartsWith(name, "padded/")) kept.push_back(tensor);
      if (name != "padded/out/inputs_embeds") continue;
      tensor.name = "padded/in/inputs_embeds";
      kept.push_back(tensor);
    }
    tensors = kept;
  });
  for (const char* stages : {"1", "2"}) {
    const ProgramResult result = RunParity(folder, {"--stages", stages, "--microbatches", "2", "--json"});
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
    EXPECT_EQ(Largest(Parse(result), "padded", "merged embeddings"), 0);
    EXPECT_GT(Largest(Parse(result), "padded", "gradients of the decoder"), 0);
  }
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
