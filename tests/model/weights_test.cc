// Fresh weights, and weights from and to model folders.
#include <torch/torch.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/model/hf_weights.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Fixture;
using torch::Tensor;

TensorSpec Spec(const std::string& name, std::vector<int64_t> shape, Initializer initializer, double deviation, double cut) {
  TensorSpec spec;
  spec.name = name;
  spec.shape = std::move(shape);
  spec.initializer = initializer;
  spec.std = deviation;
  spec.cut = cut;
  return spec;
}

TEST(FreshWeightsTest, ValuesHaveTheAskedDistribution) {
  Tensor normal = torch::empty({400, 500});
  DrawFreshTensor(1, Spec("a", {400, 500}, Initializer::kNormal, 1, 0), normal);
  EXPECT_NEAR(normal.mean().item<double>(), 0, 0.01);
  EXPECT_NEAR(normal.std().item<double>(), 1, 0.01);
  EXPECT_GT(normal.abs().max().item<double>(), 4);
  EXPECT_NEAR((normal.abs() < 1).to(torch::kDouble).mean().item<double>(), 0.6827, 0.005);
  Tensor cut = torch::empty({400, 500});
  DrawFreshTensor(1, Spec("a", {400, 500}, Initializer::kTruncatedNormal, 0.5, 0.5), cut);
  EXPECT_LE(cut.abs().max().item<double>(), 0.5);
  // Deviation of a unit normal cut at one: 0.5396.
  EXPECT_NEAR(cut.std().item<double>(), 0.5 * 0.5396, 0.002);
}

TEST(FreshWeightsTest, AnySplitOfTheModelStartsFromTheSameBytes) {
  testing::PinArithmetic();
  const Fixture fixture("kimi_vl_a3b");
  ParameterStore whole(fixture.config(), testing::WholeModel(fixture.config()));
  DrawFreshWeights(11, whole);
  for (const PartRange& range : {PartRange{0, 0, false, false, true}, PartRange{0, 3, true, false, false}, PartRange{3, 4, false, true, false}}) {
    ParameterStore part(fixture.config(), range);
    DrawFreshWeights(11, part);
    for (const TensorSpec& spec : part.specs()) EXPECT_TRUE(torch::equal(part.PublishedValue(spec.name), whole.PublishedValue(spec.name))) << spec.name;
  }
  ParameterStore other(fixture.config(), testing::WholeModel(fixture.config()));
  DrawFreshWeights(12, other);
  const std::string name = "language_model.model.layers.1.mlp.experts.3.down_proj.weight";
  EXPECT_FALSE(torch::equal(other.PublishedValue(name), whole.PublishedValue(name)));
  EXPECT_FALSE(torch::equal(whole.PublishedValue("language_model.model.layers.1.mlp.experts.2.down_proj.weight"), whole.PublishedValue(name)));
}

class FolderTest : public ::testing::Test {
 protected:
  FolderTest() : fixture_("kimi_vl_a3b"), store_(fixture_.Load()) {
    folder_ = absl::StrCat(::testing::TempDir(), "/", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
    for (const TensorSpec& spec : store_.specs()) tensors_.emplace_back(spec.name, store_.PublishedValue(spec.name));
  }
  ~FolderTest() override { std::filesystem::remove_all(folder_); }

  void WriteWhole() { ASSERT_TRUE(WriteTensorFile(folder_ + "/model.safetensors", tensors_).ok()); }
  absl::StatusOr<WeightForm> Load(ParameterStore& store) { return LoadModelFolder(folder_, store); }

  Fixture fixture_;
  ParameterStore store_;
  std::string folder_;
  std::vector<std::pair<std::string, Tensor>> tensors_;
};

TEST_F(FolderTest, ShardsAreReadThroughTheIndexAndOnlyForThePart) {
  std::string map;
  for (int shard = 0; shard < 3; ++shard) {
    std::vector<std::pair<std::string, Tensor>> some;
    const std::string file = absl::StrCat("model-0000", shard + 1, "-of-00003.safetensors");
    for (size_t i = shard; i < tensors_.size(); i += 3) {
      some.push_back(tensors_[i]);
      absl::StrAppend(&map, map.empty() ? "" : ",", "\"", tensors_[i].first, "\":\"", file, "\"");
    }
    ASSERT_TRUE(WriteTensorFile(folder_ + "/" + file, some).ok());
  }
  ASSERT_TRUE(WriteFileAtomically(folder_ + "/model.safetensors.index.json", absl::StrCat("{\"metadata\":{},\"weight_map\":{", map, "}}")).ok());
  ParameterStore part(fixture_.config(), {2, 4, false, true, false});
  const absl::StatusOr<WeightForm> form = Load(part);
  ASSERT_TRUE(form.ok()) << form.status();
  EXPECT_EQ(form->layout.size(), part.specs().size());
  for (const TensorSpec& spec : part.specs()) EXPECT_TRUE(torch::equal(part.PublishedValue(spec.name), store_.PublishedValue(spec.name))) << spec.name;
}

TEST_F(FolderTest, MissingUnknownAndMisshapedTensorsAreAllNamed) {
  for (auto& [name, tensor] : tensors_) {
    if (name == "vision_tower.encoder.blocks.1.wo.bias") name = "vision_tower.encoder.blocks.1.wo.bais";
    if (name == "language_model.model.norm.weight") tensor = torch::zeros({63});
  }
  tensors_.emplace_back("language_model.model.layers.4.input_layernorm.weight", torch::zeros({64}));
  tensors_.emplace_back("language_model.model.layers.0.self_attn.rotary_emb.inv_freq", torch::zeros({8}));
  WriteWhole();
  // The whole folder is checked whatever the part.
  ParameterStore part(fixture_.config(), {0, 1, true, false, false});
  const absl::Status status = Load(part).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("1 missing:\n    vision_tower.encoder.blocks.1.wo.bias [64]"),
                    HasSubstr("2 unknown:\n    language_model.model.layers.4.input_layernorm.weight F32[64] in model.safetensors"),
                    HasSubstr("vision_tower.encoder.blocks.1.wo.bais F32[64] in model.safetensors (nearest known: vision_tower.encoder.blocks.1.wo.bias)"),
                    HasSubstr("language_model.model.norm.weight: [63] in model.safetensors, [64] by config.json")));
}

}  // namespace
}  // namespace moonpipe
