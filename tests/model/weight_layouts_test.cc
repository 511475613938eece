// Every layout of a folder: what a load gives, and that a save gives the folder back.
#include <torch/torch.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/model/hf_weights.h"
#include "tests/model/fixture.h"
#include "tests/testing/stored_layouts.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Fixture;
using testing::StoredTensors;
using torch::Tensor;

struct Model {
  ModelConfig config;
  StoredTensors published;
};

Model Recorded(const std::string& name) {
  const Fixture fixture(name);
  const ParameterStore store = fixture.Load();
  Model model{fixture.config(), {}};
  for (const TensorSpec& spec : store.specs()) model.published[spec.name] = store.PublishedValue(spec.name).clone();
  return model;
}

std::string FreshFolder(const std::string& name) {
  const std::string folder = absl::StrCat(::testing::TempDir(), "/layouts-", name);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

void WriteFolder(const std::string& folder, const StoredTensors& tensors) {
  const auto written = WriteTensorFile(folder + "/model.safetensors", {tensors.begin(), tensors.end()});
  ASSERT_TRUE(written.ok()) << written.status();
}

ModelConfig InLayout(const std::string& layout, const ModelConfig& config) {
  return *ParseModelConfig(testing::ConfigInLayout(layout, nlohmann::json::parse(config.json)).dump());
}

// Names, dtypes, shapes and bytes of the files.
void ExpectSameTensors(const std::vector<std::string>& files, const std::string& expected_file) {
  const SafetensorsFile expected = *SafetensorsFile::Open(expected_file);
  std::set<std::string> seen;
  for (const std::string& path : files) {
    const SafetensorsFile file = *SafetensorsFile::Open(path);
    for (const StoredTensor& tensor : file.tensors()) {
      EXPECT_TRUE(seen.insert(tensor.name).second) << tensor.name << " is written twice";
      ASSERT_TRUE(expected.Contains(tensor.name)) << tensor.name << " was not there";
      const StoredTensor& before = **expected.Find(tensor.name);
      EXPECT_EQ(tensor.ToString(), before.ToString()) << tensor.name;
      EXPECT_EQ(absl::string_view(static_cast<const char*>(tensor.data), tensor.num_bytes()),
                absl::string_view(static_cast<const char*>(before.data), before.num_bytes()))
          << tensor.name;
    }
  }
  EXPECT_EQ(seen.size(), expected.tensors().size());
}

struct Case {
  std::string model;
  std::string layout;
};
std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const std::string model : {"kimi_vl_a3b", "moonlight", "kimi_k2_5"}) {
    for (const std::string& layout : testing::LayoutNames()) cases.push_back({model, layout});
  }
  return cases;
}

class LayoutTest : public ::testing::TestWithParam<Case> {};

TEST_P(LayoutTest, IsLoadedByPartsAndWrittenBackAsItCame) {
  testing::PinArithmetic();
  const auto& [name, layout] = GetParam();
  const Model model = Recorded(name);
  const ModelConfig config = InLayout(layout, model.config);
  const StoredTensors decoded = testing::Decoded(layout, model.published, config);
  const std::string folder = FreshFolder(absl::StrCat(name, "-", layout));
  WriteFolder(folder, testing::InLayout(layout, model.published, config));
  const bool quantised = config.quantization.has_value();
  std::vector<std::string> files;
  PartRange tower, first{0, 2, true, false, false}, last{2, config.text.num_hidden_layers, false, true, false};
  tower.has_vision = config.vision.has_value();
  for (const PartRange& range : {tower, first, last}) {
    ParameterStore store(config, range);
    LoadOptions options;
    options.keep_quantised = quantised;
    const absl::StatusOr<WeightForm> form = LoadModelFolder(folder, store, options);
    ASSERT_TRUE(form.ok()) << form.status();
    for (const TensorSpec& spec : store.specs()) {
      EXPECT_TRUE(torch::equal(store.PublishedValue(spec.name), decoded.at(spec.name))) << spec.name;
      const bool exact = !absl::EndsWith(layout, "bf16") && !quantised;
      EXPECT_EQ(form->HoldsInFull(spec.name), exact || absl::EndsWith(spec.name, "e_score_correction_bias")) << spec.name;
    }
    files.push_back(absl::StrCat(folder, "/part-", files.size(), ".safetensors"));
    const absl::StatusOr<WrittenWeights> written = WriteWeights(files.back(), store, *form);
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_EQ(written->file_bytes, std::filesystem::file_size(files.back()));
  }
  ExpectSameTensors(files, folder + "/model.safetensors");
  std::filesystem::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(All, LayoutTest, ::testing::ValuesIn(Cases()), [](const auto& one) {
  return absl::StrReplaceAll(absl::StrCat(one.param.model, "_", one.param.layout), {{"-", "_"}});
});

// Without keep_quantised.
TEST(QuantisedFolderTest, IsWrittenAsBFloat16ThatDecodesTheSame) {
  for (const std::string layout : {"int4", "fp8"}) {
    const Model model = Recorded("kimi_k2_5");
    const ModelConfig config = InLayout(layout, model.config);
    const std::string folder = FreshFolder("plain-" + layout);
    WriteFolder(folder, testing::InLayout(layout, model.published, config));
    ParameterStore store(config, testing::WholeModel(config));
    const WeightForm form = *LoadModelFolder(folder, store);
    const std::string name = "language_model.model.layers.1.mlp.experts.0.down_proj.weight";
    EXPECT_FALSE(form.HoldsInFull(name));
    const std::string plain = FreshFolder("decoded-" + layout);
    ASSERT_TRUE(WriteWeights(plain + "/model.safetensors", store, form).ok());
    EXPECT_EQ((*(*SafetensorsFile::Open(plain + "/model.safetensors")).Find(name))->type, StoredType::kBF16);
    // The configuration without quantization_config reads it.
    const absl::StatusOr<ModelConfig> plain_config = ParseModelConfig(WithoutQuantization(config.json));
    ASSERT_TRUE(plain_config.ok()) << plain_config.status();
    EXPECT_FALSE(plain_config->quantization.has_value());
    ParameterStore again(*plain_config, testing::WholeModel(config));
    ASSERT_TRUE(LoadModelFolder(plain, again).ok());
    for (const TensorSpec& spec : store.specs()) EXPECT_TRUE(torch::equal(store.PublishedValue(spec.name), again.PublishedValue(spec.name))) << spec.name;
  }
}

TEST(QuantisedFolderTest, ChangedWeightsAreRoundedToTheScalesThatWereLoaded) {
  const Model model = Recorded("kimi_k2_5");
  const ModelConfig config = InLayout("int4", model.config);
  const std::string folder = FreshFolder("changed");
  WriteFolder(folder, testing::InLayout("int4", model.published, config));
  ParameterStore store(config, testing::WholeModel(config));
  const WeightForm form = *LoadModelFolder(folder, store, {.keep_quantised = true});
  const std::string name = "language_model.model.layers.1.mlp.experts.0.up_proj.weight";
  Tensor weight = store.PublishedValue(name);
  const Tensor before = weight.clone();
  weight.mul_(0.5);
  const std::string again = FreshFolder("changed-again");
  ASSERT_TRUE(WriteWeights(again + "/model.safetensors", store, form).ok());
  ParameterStore loaded(config, testing::WholeModel(config));
  ASSERT_TRUE(LoadModelFolder(again, loaded, {.keep_quantised = true}).ok());
  const Tensor scale = ToTorch(**(*SafetensorsFile::Open(folder + "/model.safetensors")).Find(name + "_scale"))->to(torch::kFloat);
  const Tensor step = scale.repeat_interleave(32, 1);
  // Half a step and the rounding to bf16.
  EXPECT_TRUE(((loaded.PublishedValue(name) - before * 0.5).abs() <= 0.52 * step).all().item<bool>());
  const std::string other = "language_model.model.layers.1.mlp.experts.1.up_proj.weight";
  EXPECT_TRUE(torch::equal(loaded.PublishedValue(other), store.PublishedValue(other)));
}

TEST(QuantisedFolderTest, WhatDoesNotFitThePackedFormIsNamed) {
  const Model model = Recorded("kimi_k2_5");
  const ModelConfig config = InLayout("int4", model.config);
  StoredTensors stored = testing::InLayout("int4", model.published, config);
  const std::string expert = "language_model.model.layers.1.mlp.experts.";
  stored[expert + "0.up_proj.weight_shape"] = torch::tensor({32, 65}, torch::kInt);
  stored[expert + "1.up_proj.weight_scale"] = torch::ones({32, 3}, torch::kBFloat16);
  stored[expert + "2.up_proj.weight_packed"] = stored[expert + "2.up_proj.weight_packed"].to(torch::kLong);
  stored.erase(expert + "3.up_proj.weight_scale");
  stored[expert + "4.up_proj.weight_zero_point"] = torch::zeros({32, 2}, torch::kInt);
  const std::string folder = FreshFolder("misfits");
  WriteFolder(folder, stored);
  ParameterStore store(config, {0, 1, true, false, false});
  EXPECT_THAT(std::string(LoadModelFolder(folder, store).status().message()),
              AllOf(HasSubstr("0.up_proj.weight_shape in model.safetensors: says [32, 65], [32, 64] by config.json"),
                    HasSubstr("1.up_proj.weight_scale: [32, 3] in model.safetensors, [32, 2] by config.json"),
                    HasSubstr("2.up_proj.weight_packed in model.safetensors: stored as I64, not I32"),
                    HasSubstr("1 missing:\n    language_model.model.layers.1.mlp.experts.3.up_proj.weight_scale [32, 2]"),
                    HasSubstr("4.up_proj.weight_zero_point I32[32, 2] in model.safetensors")));
  ParameterStore plain(model.config, {0, 1, true, false, false});
  EXPECT_THAT(std::string(LoadModelFolder(folder, plain).status().message()),
              HasSubstr("is packed, but config.json has no quantization_config of 4-bit weights"));
}

TEST(StackedFolderTest, AStackOfAnotherHeightIsNamedWithBothShapes) {
  const Model model = Recorded("moonlight");
  StoredTensors stored = testing::InLayout("stacked-gate-up", model.published, model.config);
  stored["model.layers.2.mlp.experts.gate_up_proj"] = torch::zeros({8, 63, 64});
  stored.erase("model.layers.3.mlp.experts.down_proj");
  const std::string folder = FreshFolder("stack-misfit");
  WriteFolder(folder, stored);
  ParameterStore store(model.config, {0, 1, true, false, false});
  EXPECT_THAT(std::string(LoadModelFolder(folder, store).status().message()),
              AllOf(HasSubstr("model.layers.2.mlp.experts.gate_up_proj: [8, 63, 64] in model.safetensors, [8, 64, 64] by config.json"),
                    HasSubstr("1 missing:\n    model.layers.3.mlp.experts.down_proj [8, 64, 32] for model.layers.3.mlp.experts.0.down_proj.weight"),
                    Not(HasSubstr("unknown"))));
}

// More than any list that a person would cut short.
TEST(LayoutProblemsTest, AllMissingTensorsAreListedAtOnce) {
  const Model model = Recorded("kimi_vl_a3b");
  const std::string folder = FreshFolder("nearly-empty");
  const std::string kept = "language_model.model.norm.weight";
  WriteFolder(folder, {{kept, model.published.at(kept)}});
  ParameterStore store(model.config, {0, 1, true, false, false});
  const std::string message(LoadModelFolder(folder, store).status().message());
  for (const auto& [name, tensor] : model.published) {
    EXPECT_TRUE(name == kept || absl::StrContains(message, absl::StrCat("\n    ", name, " ["))) << name;
  }
}

class TiedFolderTest : public ::testing::Test {
 protected:
  TiedFolderTest() : model_(Recorded("moonlight")) {
    nlohmann::json config = nlohmann::json::parse(model_.config.json);
    config["tie_word_embeddings"] = true;
    model_.config = *ParseModelConfig(config.dump());
  }
  Model model_;
};

TEST_F(TiedFolderTest, ASecondCopyOfTheHeadIsReadAndWrittenBack) {
  for (const bool copy : {false, true}) {
    StoredTensors stored = model_.published;
    stored.erase("lm_head.weight");
    if (copy) stored["lm_head.weight"] = stored.at("model.embed_tokens.weight").clone();
    const std::string folder = FreshFolder(absl::StrCat("tied-", copy));
    WriteFolder(folder, stored);
    std::vector<std::string> files;
    for (const PartRange& range : {PartRange{0, 2, true, false, false}, PartRange{2, 4, false, true, false}}) {
      ParameterStore store(model_.config, range);
      const absl::StatusOr<WeightForm> form = LoadModelFolder(folder, store);
      ASSERT_TRUE(form.ok()) << form.status();
      EXPECT_TRUE(torch::equal(store.PublishedValue("model.embed_tokens.weight"), stored.at("model.embed_tokens.weight")));
      files.push_back(absl::StrCat(folder, "/part-", files.size(), ".safetensors"));
      ASSERT_TRUE(WriteWeights(files.back(), store, *form).ok());
    }
    ExpectSameTensors(files, folder + "/model.safetensors");
  }
}

TEST_F(TiedFolderTest, AHeadThatDiffersFromTheEmbeddingIsRefused) {
  const std::string folder = FreshFolder("tied-differs");
  WriteFolder(folder, model_.published);
  ParameterStore store(model_.config, testing::WholeModel(model_.config));
  EXPECT_THAT(std::string(LoadModelFolder(folder, store).status().message()),
              HasSubstr("lm_head.weight in model.safetensors differs from model.embed_tokens.weight, but tie_word_embeddings is true"));
}

// Largest RssAnon of this process while `work` runs, above what there was before, in bytes.
uint64_t AnonymousPeak(const std::function<void()>& work) {
  const auto read = [] {
    std::ifstream status("/proc/self/status");
    std::string line;
    uint64_t kilobytes = 0;
    while (std::getline(status, line)) {
      if (absl::StartsWith(line, "RssAnon:")) kilobytes = std::stoull(line.substr(8));
    }
    return kilobytes * 1024;
  };
  const uint64_t before = read();
  std::atomic<bool> done = false;
  std::atomic<uint64_t> peak = before;
  std::thread sampler([&] {
    while (!done) peak = std::max<uint64_t>(peak, read());
  });
  work();
  peak = std::max<uint64_t>(peak, read());
  done = true;
  sampler.join();
  return peak - before;
}

// An INT4 folder of so many layers of experts, 36 MiB each, written tensor by tensor.
ModelConfig WriteInt4Folder(const std::string& folder, int64_t expert_layers) {
  nlohmann::json json = testing::ConfigInLayout("int4", nlohmann::json::parse(Fixture("kimi_k2_5").config().json));
  // An expert has 3 x 1024 x 512 values, 0.75 MiB packed.
  json["text_config"]["hidden_size"] = json["vision_config"]["text_hidden_size"] = 1024;
  json["text_config"]["moe_intermediate_size"] = 512;
  json["text_config"]["n_routed_experts"] = 42;
  json["text_config"]["num_hidden_layers"] = expert_layers + 1;
  const ModelConfig config = *ParseModelConfig(json.dump());
  std::vector<StoredTensor> tensors;
  std::map<std::string, std::vector<int32_t>> shapes;
  for (const TensorSpec& spec : ListTensors(config)) {
    if (spec.expert < 0) {
      tensors.push_back({spec.name, spec.trainable ? StoredType::kBF16 : StoredType::kF32, spec.shape, nullptr});
      continue;
    }
    shapes[spec.name + "_shape"] = {static_cast<int32_t>(spec.shape[0]), static_cast<int32_t>(spec.shape[1])};
    tensors.push_back({spec.name + "_packed", StoredType::kI32, {spec.shape[0], spec.shape[1] / 8}, nullptr});
    tensors.push_back({spec.name + "_scale", StoredType::kBF16, {spec.shape[0], spec.shape[1] / 32}, nullptr});
    tensors.push_back({spec.name + "_shape", StoredType::kI32, {2}, nullptr});
  }
  // The same bytes for every tensor: only where they go to is measured. As scales they are tiny, as words any.
  const std::string bytes(size_t{64} << 20, '\x3c');
  EXPECT_TRUE(WriteSafetensors(folder + "/model.safetensors", tensors, {}, [&](const StoredTensor& tensor) -> absl::StatusOr<const void*> {
                return absl::EndsWith(tensor.name, "_shape") ? static_cast<const void*>(shapes.at(tensor.name).data()) : bytes.data();
              }).ok());
  return config;
}

void ExpectLoadStaysWithinTheStage(const std::string& name, int64_t expert_layers, int64_t own_layers, uint64_t least_file_bytes) {
  const std::string folder = FreshFolder(name);
  const ModelConfig config = WriteInt4Folder(folder, expert_layers);
  EXPECT_GE(std::filesystem::file_size(folder + "/model.safetensors"), least_file_bytes);
  uint64_t own_bytes = 0;
  const PartRange stage{1, 1 + own_layers, false, false, false};
  for (const TensorSpec& spec : ListTensors(config, stage)) own_bytes += static_cast<uint64_t>(spec.num_elements()) * 4;
  const uint64_t peak = AnonymousPeak([&] {
    ParameterStore store(config, stage);
    const absl::StatusOr<WeightForm> form = LoadModelFolder(folder, store, {.keep_quantised = true});
    ASSERT_TRUE(form.ok()) << form.status();
    // Code 0xc - 8 times bf16 0x3c3c.
    EXPECT_EQ(store.PublishedValue("language_model.model.layers.1.mlp.experts.1.up_proj.weight")[0][0].item<float>(), 4 * 0.011474609375f);
  });
  const uint64_t limit = own_bytes * 12 / 10 + (uint64_t{256} << 20);
  EXPECT_LE(peak, limit);
  EXPECT_GE(peak, own_bytes * 9 / 10);  // or nothing was measured
  std::cout << name << ": file " << (std::filesystem::file_size(folder + "/model.safetensors") >> 20) << " MiB, stage's weights " << (own_bytes >> 20)
            << " MiB, largest anonymous memory " << (peak >> 20) << " MiB, limit " << (limit >> 20) << " MiB\n";
  std::filesystem::remove_all(folder);
}

TEST(LoadMemoryTest, AStageTakesTheMemoryOfItsOwnWeights) { ExpectLoadStaysWithinTheStage("memory", 3, 1, uint64_t{96} << 20); }
TEST(LoadMemoryLongTest, AStageOfTwoGibibytesTakesTheMemoryOfItsOwnWeights) {
  ExpectLoadStaysWithinTheStage("memory-long", 64, 4, uint64_t{2} << 30);
}

}  // namespace
}  // namespace moonpipe
