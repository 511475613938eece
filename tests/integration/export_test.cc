// A folder that is loaded, trained for a step at rate 0 and saved comes back as it was: through the real cluster, whatever its layout.
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/model/hf_weights.h"
#include "moonpipe/spec/flavors.h"
#include "tests/data/testing_files.h"
#include "tests/integration/tiny.h"
#include "tests/testing/stored_layouts.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::StoredTensors;

// name -> dtype and shape, bytes.
using Stored = std::map<std::string, std::pair<std::string, std::string>>;

Stored ReadFolder(const std::string& folder) {
  Stored stored;
  const absl::StatusOr<ModelFolder> files = ModelFolder::Open(folder);
  EXPECT_TRUE(files.ok()) << files.status();
  if (!files.ok()) return stored;
  for (const std::string& name : files->Names()) {
    const StoredTensor& tensor = **files->Find(name);
    stored[name] = {tensor.ToString(), std::string(static_cast<const char*>(tensor.data), tensor.num_bytes())};
  }
  return stored;
}

void ExpectSame(const Stored& found, const Stored& expected) {
  for (const auto& [name, tensor] : expected) {
    const auto other = found.find(name);
    ASSERT_NE(other, found.end()) << name << " is missing";
    EXPECT_EQ(other->second.first, tensor.first) << name;
    EXPECT_TRUE(other->second.second == tensor.second) << name << " has other bytes";
  }
  EXPECT_EQ(found.size(), expected.size());
}

nlohmann::json ConfigOf(const std::string& flavor) { return nlohmann::json::parse((*FindFlavor(flavor))->config_json); }

// Fresh weights of the model, rounded to bf16 where the layout will round them anyway, and a bias that is not zero.
StoredTensors Weights(const ModelConfig& config) {
  PartRange whole{0, config.text.num_hidden_layers, true, true, config.vision.has_value()};
  ParameterStore store(config, whole);
  DrawFreshWeights(3, store);
  StoredTensors weights;
  for (const TensorSpec& spec : store.specs()) {
    weights[spec.name] = store.PublishedValue(spec.name).clone();
    if (!spec.trainable) weights[spec.name].copy_(torch::linspace(-0.01, 0.02, spec.num_elements()));
    // Subtracting nothing can turn a -0 into 0.
    if (spec.trainable) weights[spec.name].flatten().slice(0, 0, torch::indexing::None, 5).fill_(-0.0);
  }
  return weights;
}

// A model folder in the layout and a run that trains it; the tensors are in two shards where the layout is published.
TinyRun WriteRun(const std::string& name, const std::string& layout, const nlohmann::json& json) {
  TinyRun run = WriteTinyRun(name, testing::ConfigInLayout(layout, json));
  const ModelConfig config = *ParseModelConfig(ReadFile(run.folder + "/config.json").value());
  std::filesystem::create_directories(run.folder + "/model");
  std::filesystem::rename(run.folder + "/config.json", run.folder + "/model/config.json");
  if (config.architecture == Architecture::kKimiK25) {
    // The digits' own file beside the tokenizer is a Kimi-VL's.
    EXPECT_TRUE(WriteFileAtomically(run.folder + "/model/preprocessor_config.json", R"({"media_proc_cfg": {
        "patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 4096, "patch_limit_on_one_side": 64, "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": null, "sample_fps": 2.0, "max_num_frames_each_video": null, "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff", "fixed_output_tokens": null, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}})").ok());
  }
  const StoredTensors stored = testing::InLayout(layout, Weights(config), config);
  if (layout == "published") {
    std::vector<std::pair<std::string, torch::Tensor>> shards[2];
    nlohmann::json index;
    for (const auto& [tensor, value] : stored) {
      const size_t shard = index["weight_map"].size() % 2;
      shards[shard].emplace_back(tensor, value);
      index["weight_map"][tensor] = absl::StrCat("model-0000", shard + 1, "-of-00002.safetensors");
    }
    for (size_t shard = 0; shard < 2; ++shard) {
      EXPECT_TRUE(WriteTensorFile(absl::StrCat(run.folder, "/model/model-0000", shard + 1, "-of-00002.safetensors"), shards[shard]).ok());
    }
    EXPECT_TRUE(WriteFileAtomically(run.folder + "/model/model.safetensors.index.json", index.dump()).ok());
  } else {
    EXPECT_TRUE(WriteTensorFile(run.folder + "/model/model.safetensors", {stored.begin(), stored.end()}).ok());
  }
  std::string yaml = *ReadFile(run.run_file);
  yaml = absl::StrReplaceAll(yaml, {{"config: config.json", "path: model"}});
  EXPECT_TRUE(WriteFileAtomically(run.run_file, yaml).ok());
  return run;
}

const std::vector<std::string> kStandStill = {"train.steps=1", "optimizer.learning_rate=0", "train.expert_bias_rate=0"};

class ExportTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ExportTest, OneStepAtRateZeroGivesTheFolderBack) {
  const std::string layout = GetParam();
  const TinyRun run = WriteRun("export-" + layout, layout, ConfigOf("debug-kimi-k2.5"));
  std::vector<std::string> overrides = kStandStill;
  const bool quantised = layout == "int4" || layout == "fp8";
  if (quantised) overrides.push_back("model.keep_quantised=true");
  const TrainResult result = RunTrain(run, "one", overrides);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::string checkpoint = NewestCheckpoint(result.run_folder);
  ExpectSame(ReadFolder(checkpoint), ReadFolder(run.folder + "/model"));
  EXPECT_EQ(*ReadFile(checkpoint + "/config.json"), *ReadFile(run.folder + "/model/config.json"));

  // And again from the checkpoint, which another split resumes.
  overrides[0] = "train.steps=2";
  overrides.push_back("pipeline.stages=1");
  const TrainResult resumed = RunTrain(run, "one", overrides);
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  ASSERT_NE(NewestCheckpoint(resumed.run_folder), checkpoint);
  ExpectSame(ReadFolder(NewestCheckpoint(resumed.run_folder)), ReadFolder(run.folder + "/model"));
}

INSTANTIATE_TEST_SUITE_P(Layouts, ExportTest, ::testing::ValuesIn(testing::LayoutNames()),
                         [](const auto& one) { return absl::StrReplaceAll(one.param, {{"-", "_"}}); });

TEST(ExportTest, OtherModelsComeBackToo) {
  const std::pair<std::string, nlohmann::json> models[] = {
      {"kimi-vl", ConfigOf("debug-kimi-vl")}, {"tied", TinyTiedConfig()}};
  for (const auto& [name, config] : models) {
    const TinyRun run = WriteRun("export-model-" + name, "other-projector", config);
    const TrainResult result = RunTrain(run, "one", kStandStill);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    ExpectSame(ReadFolder(NewestCheckpoint(result.run_folder)), ReadFolder(run.folder + "/model"));
  }
}

TEST(ExportTest, DecodedWeightsAreLeftAsBFloat16AndTheConfigurationSaysSo) {
  for (const std::string layout : {"int4", "fp8"}) {
    const TinyRun run = WriteRun("decoded-" + layout, layout, ConfigOf("debug-kimi-k2.5"));
    const TrainResult result = RunTrain(run, "one", kStandStill);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const std::string checkpoint = NewestCheckpoint(result.run_folder);
    EXPECT_THAT(*ReadFile(checkpoint + "/config.json"), Not(HasSubstr("quantization_config")));
    const ModelConfig config = *ReadModelConfig(run.folder + "/model/config.json");
    StoredTensors expected = testing::Decoded(layout, Weights(config), config);
    Stored stored;
    for (auto& [name, tensor] : expected) {
      if (!absl::EndsWith(name, "e_score_correction_bias")) tensor = tensor.to(torch::kBFloat16);
    }
    const std::string folder = FreshFolder("expected-" + layout);
    ASSERT_TRUE(WriteTensorFile(folder + "/model.safetensors", {expected.begin(), expected.end()}).ok());
    ExpectSame(ReadFolder(checkpoint), ReadFolder(folder));
  }
}

// Training moves weights by less than bf16 or four bits show: what is resumed must be the fp32 values.
TEST(ExportTest, ARunFromRoundedWeightsResumesExactly) {
  for (const std::string layout : {"bf16", "int4"}) {
    const TinyRun run = WriteRun("resume-" + layout, layout, ConfigOf("debug-kimi-k2.5"));
    std::vector<std::string> overrides = {"train.steps=4", "optimizer.schedule.kind=constant", "optimizer.schedule.warmup_steps=0",
                                          "optimizer.learning_rate=1e-4"};
    if (layout == "int4") overrides.push_back("model.keep_quantised=true");
    const TrainResult whole = RunTrain(run, "whole", overrides);
    ASSERT_EQ(whole.exit_code, 0) << whole.err;
    overrides[0] = "train.steps=2";
    ASSERT_EQ(RunTrain(run, "halves", overrides).exit_code, 0);
    overrides[0] = "train.steps=4";
    const TrainResult halves = RunTrain(run, "halves", overrides);
    ASSERT_EQ(halves.exit_code, 0) << halves.err;
    const auto state = ReadTensors(NewestCheckpoint(whole.run_folder), "optimizer");
    ASSERT_TRUE(state.contains("master.language_model.model.layers.0.self_attn.o_proj.weight"));
    EXPECT_TRUE(state == ReadTensors(NewestCheckpoint(halves.run_folder), "optimizer")) << layout;
    ExpectSame(ReadFolder(NewestCheckpoint(halves.run_folder)), ReadFolder(NewestCheckpoint(whole.run_folder)));
    // It did train.
    EXPECT_NE(ReadFolder(NewestCheckpoint(whole.run_folder)), ReadFolder(run.folder + "/model"));
  }
}

TEST(ExportTest, AFolderThatDoesNotFitStopsTheRunAndNamesEveryTensor) {
  const TinyRun run = WriteRun("misfit", "bf16", ConfigOf("debug-kimi-vl"));
  const std::string path = run.folder + "/model/model.safetensors";
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  {
    const SafetensorsFile file = *SafetensorsFile::Open(path);
    for (const StoredTensor& tensor : file.tensors()) {
      if (tensor.name != "language_model.model.norm.weight") tensors.emplace_back(tensor.name, *ToTorch(tensor));
    }
  }
  tensors.emplace_back("language_model.model.layers.7.input_layernorm.weight", torch::zeros({64}));
  for (auto& [name, tensor] : tensors) {
    if (name == "vision_tower.patch_embed.proj.bias") tensor = torch::zeros({47});
  }
  ASSERT_TRUE(WriteTensorFile(path, tensors).ok());
  const TrainResult result = RunTrain(run, "one", kStandStill);
  EXPECT_NE(result.exit_code, 0);
  for (const char* part : {"1 missing:\n    language_model.model.norm.weight [64]", "language_model.model.layers.7.input_layernorm.weight F32[64]",
                           "vision_tower.patch_embed.proj.bias: [47] in model.safetensors, [48] by config.json"}) {
    EXPECT_THAT(result.err, HasSubstr(part));
  }
}

// A model without a tower has no encoder; the samples with pictures are refused, not read as text.
TEST(TextOnlyTest, APlanHasNoEncoderAndAPictureIsRefused) {
  TinyRun run = WriteTinyRun("text-only", ConfigOf("debug-moonlight"));
  const TrainResult refused = RunTrain(run, "pictures", {"train.steps=1", "data.chat_template=moonlight"});
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_THAT(refused.err, HasSubstr("picture"));
  EXPECT_THAT(refused.err, HasSubstr("text-only"));
  EXPECT_FALSE(std::filesystem::exists(refused.run_folder + "/logs/vision-encoder.log"));
}

}  // namespace
}  // namespace moonpipe
