// Muon against the same update written down in float64 by singular values: five iterations of a Newton-Schulz polynomial change singular
// values alone, so U diag(p(p(p(p(p(s / |s|)))))) V^T is what they must give.
#include "moonpipe/train/muon.h"

#include <torch/torch.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/train/optimizer.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

Tensor Random(std::vector<int64_t> shape, uint64_t seed) {
  torch::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::empty(shape).normal_(0, 1, generator);
}

Tensor OrthogonalizeBySingularValues(const Tensor& matrix) {
  const auto [u, s, vt] = at::linalg_svd(matrix.to(torch::kDouble), false);
  Tensor values = s / s.square().sum().sqrt();
  for (int i = 0; i < 5; ++i) values = 3.4445 * values - 4.7750 * values.pow(3) + 2.0315 * values.pow(5);
  return at::matmul(u * values, vt);
}

void ExpectNear(const Tensor& got, const Tensor& want, double tolerance) {
  const double largest = (got.to(torch::kDouble) - want.to(torch::kDouble)).abs().max().item<double>();
  EXPECT_LE(largest, tolerance);
}

TEST(MuonTest, OrthogonalizeChangesSingularValuesAsThePolynomialSays) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{12, 12}, {6, 20}, {20, 6}, {1, 7}}) {
    const Tensor matrix = Random({rows, columns}, static_cast<uint64_t>(rows));
    ExpectNear(Orthogonalize(matrix), OrthogonalizeBySingularValues(matrix), 2e-5);
  }
}

TEST(MuonTest, OrthogonalizeLeavesZerosAlone) { EXPECT_TRUE(torch::equal(Orthogonalize(torch::zeros({3, 4})), torch::zeros({3, 4}))); }

// Three steps of the whole rule in float64, written down from its formula.
TEST(MuonTest, AStepIsMomentumOrthogonalPartSizeAndDecay) {
  const MuonStep step{.learning_rate = 0.02, .weight_decay = 0.1, .momentum = 0.95};
  Tensor value = Random({8, 24}, 1), momentum = torch::zeros({8, 24});
  Tensor wanted = value.to(torch::kDouble), m = momentum.to(torch::kDouble);
  for (uint64_t i = 0; i < 3; ++i) {
    const Tensor gradient = Random({8, 24}, 10 + i);
    TakeMuonStep(step, {{1, 0, 8}}, value, gradient, momentum);
    const Tensor g = gradient.to(torch::kDouble);
    m = 0.95 * m + 0.05 * g;
    wanted = wanted * (1 - 0.02 * 0.1) - 0.02 * 0.2 * std::sqrt(24.0) * OrthogonalizeBySingularValues(0.95 * m + 0.05 * g);
  }
  ExpectNear(value, wanted, 2e-6);
  ExpectNear(momentum, m, 1e-6);
}

TEST(MuonTest, FusedMatricesAreOrthogonalizedByThemselves) {
  // Two heads of 3 key rows and 5 value rows, alternating: keys are 6 x 7, values 10 x 7.
  const Tensor gradient = Random({16, 7}, 3);
  Tensor value = torch::zeros({16, 7}), momentum = torch::zeros({16, 7});
  TakeMuonStep({.learning_rate = 1, .weight_decay = 0, .momentum = 0}, {{2, 0, 3}, {2, 3, 5}}, value, gradient, momentum);
  const Tensor by_head = gradient.view({2, 8, 7}), moved = value.view({2, 8, 7});
  ExpectNear(moved.narrow(1, 0, 3).reshape({6, 7}), -0.2 * std::sqrt(7.0) * OrthogonalizeBySingularValues(by_head.narrow(1, 0, 3).reshape({6, 7})), 2e-5);
  ExpectNear(moved.narrow(1, 3, 5).reshape({10, 7}), -0.2 * std::sqrt(10.0) * OrthogonalizeBySingularValues(by_head.narrow(1, 3, 5).reshape({10, 7})), 2e-5);
}

constexpr char kExpert[] = "language_model.model.layers.2.mlp.experts.5.down_proj.weight";
constexpr char kOtherExpert[] = "language_model.model.layers.2.mlp.experts.4.down_proj.weight";

cluster::v1::OptimizerSpec Spec(const char* kind) {
  cluster::v1::OptimizerSpec spec;
  spec.set_learning_rate(1e-2);
  spec.set_beta1(0.9);
  spec.set_beta2(0.95);
  spec.set_epsilon(1e-8);
  spec.set_weight_decay(0.1);
  spec.set_momentum(0.95);
  spec.set_kind(kind);
  return spec;
}

struct Trained {
  explicit Trained(const cluster::v1::OptimizerSpec& spec)
      : store(*ParseModelConfig(TinyConfig().dump()),
              PartRange{.first_layer = 0, .end_layer = 4, .has_embedding = true, .has_head = true, .has_vision = true}) {
    DrawFreshWeights(3, store);
    store.ZeroGradients();
    optimizer = std::make_unique<Optimizer>(&store, spec, *AssignUpdateRules(spec, store.specs(), store.specs()));
  }
  void Step(uint64_t number) {
    torch::NoGradGuard no_grad;
    uint64_t seed = number * 1000;
    for (const TensorSpec& spec : store.specs()) {
      if (spec.trainable) store.PublishedGradient(spec.name).copy_(Random(spec.shape, ++seed));
    }
    optimizer->Step(1, 1);
  }
  ParameterStore store;
  std::unique_ptr<Optimizer> optimizer;
};

TEST(MuonTest, MovesMatricesAndLeavesEmbeddingsHeadNormsBiasesAndRouterToAdamW) {
  const Trained trained(Spec("muon"));
  std::set<std::string> momentum, moments;
  for (const StoredTensor& tensor : trained.optimizer->State()) {
    if (absl::StartsWith(tensor.name, "momentum.")) momentum.insert(tensor.name.substr(9));
    if (absl::StartsWith(tensor.name, "exp_avg.")) moments.insert(tensor.name.substr(8));
  }
  for (const char* name : {"language_model.model.layers.1.self_attn.q_proj.weight", "language_model.model.layers.1.self_attn.kv_b_proj.weight",
                           "language_model.model.layers.0.mlp.up_proj.weight", kExpert, "vision_tower.encoder.blocks.0.wqkv.weight",
                           "multi_modal_projector.linear_1.weight"}) {
    EXPECT_TRUE(momentum.contains(name)) << name;
    EXPECT_FALSE(moments.contains(name)) << name;
  }
  for (const char* name : {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight", "language_model.model.norm.weight",
                           "language_model.model.layers.1.mlp.gate.weight", "vision_tower.patch_embed.proj.weight",
                           "vision_tower.patch_embed.pos_emb.weight", "vision_tower.encoder.blocks.0.wqkv.bias"}) {
    EXPECT_TRUE(moments.contains(name)) << name;
    EXPECT_FALSE(momentum.contains(name)) << name;
  }
}

TEST(MuonTest, AnExpertIsAMatrixOfItsOwn) {
  Trained trained(Spec("muon"));
  torch::NoGradGuard no_grad;
  const Tensor expert = trained.store.PublishedValue(kExpert).detach().clone(), other = trained.store.PublishedValue(kOtherExpert).detach().clone();
  const Tensor gradient = Random(expert.sizes().vec(), 7);
  trained.store.PublishedGradient(kExpert).copy_(gradient);
  trained.optimizer->Step(1, 1);
  const double rows = static_cast<double>(expert.size(0)), columns = static_cast<double>(expert.size(1));
  const Tensor wanted = expert.to(torch::kDouble) * (1 - 1e-3) - 1e-2 * 0.2 * std::sqrt(std::max(rows, columns)) * OrthogonalizeBySingularValues(gradient);
  ExpectNear(trained.store.PublishedValue(kExpert), wanted, 2e-6);
  ExpectNear(trained.store.PublishedValue(kOtherExpert), other * (1 - 1e-3), 1e-7);
}

// What one step from no momentum must make of the rows `part` of a matrix, each part orthogonalised by itself.
Tensor SteppedByParts(const Tensor& value, const Tensor& gradient, const std::vector<Tensor>& parts) {
  Tensor wanted = value.to(torch::kDouble) * (1 - 1e-3);
  for (const Tensor& rows : parts) {
    const Tensor g = gradient.index_select(0, rows);
    const double size = 0.2 * std::sqrt(static_cast<double>(std::max(g.size(0), g.size(1))));
    wanted.index_add_(0, rows, OrthogonalizeBySingularValues(g), -1e-2 * size);
  }
  return wanted;
}

TEST(MuonTest, TensorsThatHoldSeveralMatricesAreCutByTheirNames) {
  Trained trained(Spec("muon"));
  torch::NoGradGuard no_grad;
  const auto range = [](int64_t first, int64_t end) { return torch::arange(first, end, torch::kLong); };
  const Tensor keys = torch::cat({range(0, 8), range(16, 24)}), values = torch::cat({range(8, 16), range(24, 32)});  // head by head
  const std::string attention = "language_model.model.layers.1.self_attn.", tower = "vision_tower.encoder.blocks.0.wqkv.weight";
  const int64_t third = trained.store.PublishedValue(tower).size(0) / 3;
  const std::map<std::string, std::vector<Tensor>> cut = {
      {tower, {range(0, third), range(third, 2 * third), range(2 * third, 3 * third)}},
      {attention + "kv_a_proj_with_mqa.weight", {range(0, 16), range(16, 24)}},
      {attention + "kv_b_proj.weight", {keys, values}},
      {attention + "q_proj.weight", {range(0, 32)}},
  };
  std::map<std::string, Tensor> wanted;
  uint64_t seed = 40;
  for (const auto& [name, parts] : cut) {
    const Tensor value = trained.store.PublishedValue(name).detach(), gradient = Random(value.sizes().vec(), ++seed);
    trained.store.PublishedGradient(name).copy_(gradient);
    wanted[name] = SteppedByParts(value, gradient, parts);
  }
  trained.optimizer->Step(1, 1);
  for (const auto& [name, value] : wanted) {
    SCOPED_TRACE(name);
    ExpectNear(trained.store.PublishedValue(name).detach(), value, 2e-6);
  }
}

TEST(MuonTest, TheGradientIsClippedBeforeItEntersTheMomentum) {
  Trained trained(Spec("muon"));
  torch::NoGradGuard no_grad;
  const Tensor gradient = Random(trained.store.PublishedValue(kExpert).sizes().vec(), 8);
  trained.store.PublishedGradient(kExpert).copy_(gradient);
  trained.optimizer->Step(0.25, 1);
  int found = 0;
  for (const StoredTensor& tensor : trained.optimizer->State()) {
    if (tensor.name != absl::StrCat("momentum.", kExpert)) continue;
    ++found;
    ExpectNear(torch::from_blob(const_cast<void*>(tensor.data), tensor.shape, torch::kFloat), 0.05 * 0.25 * gradient.to(torch::kDouble), 1e-7);
  }
  EXPECT_EQ(found, 1);
}

SafetensorsFile Saved(const Optimizer& optimizer, const std::string& name) {
  const std::string path = absl::StrCat(testing::TempDir(), "/muon_test_", ::getpid(), "_", name);
  EXPECT_TRUE(WriteSafetensors(path, optimizer.State()).ok());
  return *SafetensorsFile::Open(path);
}

TEST(MuonTest, ARestartGoesOnWithTheSameBits) {
  Trained straight(Spec("muon")), first(Spec("muon")), second(Spec("muon"));
  for (uint64_t step = 0; step < 4; ++step) straight.Step(step);
  for (uint64_t step = 0; step < 2; ++step) first.Step(step);
  std::vector<SafetensorsFile> files;
  files.push_back(Saved(*first.optimizer, "restart"));
  ASSERT_TRUE(second.optimizer->LoadState(files, first.optimizer->steps()).ok());
  torch::NoGradGuard no_grad;
  for (const TensorSpec& tensor : first.store.specs()) second.store.PublishedValue(tensor.name).copy_(first.store.PublishedValue(tensor.name));
  for (uint64_t step = 2; step < 4; ++step) second.Step(step);
  for (const TensorSpec& tensor : straight.store.specs()) {
    EXPECT_TRUE(torch::equal(straight.store.PublishedValue(tensor.name), second.store.PublishedValue(tensor.name))) << tensor.name;
  }
}

TEST(MuonTest, StateOfTheOtherKindIsRefusedWithWhatToDo) {
  for (const auto& [saved, loaded] : {std::pair<const char*, const char*>{"adamw", "muon"}, {"muon", "adamw"}}) {
    Trained writer{Spec(saved)}, reader{Spec(loaded)};
    std::vector<SafetensorsFile> files;
    files.push_back(Saved(*writer.optimizer, saved));
    const absl::Status status = reader.optimizer->LoadState(files, 1);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), AllOf(HasSubstr(absl::StrCat("the state of ", saved)), HasSubstr("optimizer.kind"), HasSubstr("model.path")));
  }
}

}  // namespace
}  // namespace moonpipe
