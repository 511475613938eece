#include "moonpipe/train/optimizer.h"

#include <torch/torch.h>

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/model/fresh_weights.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kQuery[] = "language_model.model.layers.1.self_attn.q_proj.weight";
constexpr char kExpert[] = "language_model.model.layers.2.mlp.experts.5.down_proj.weight";
constexpr char kPatches[] = "vision_tower.patch_embed.proj.weight";
constexpr char kProjector[] = "multi_modal_projector.linear_1.weight";

cluster::v1::OptimizerSpec Spec() {
  cluster::v1::OptimizerSpec spec;
  spec.set_learning_rate(1e-2);
  spec.set_beta1(0.9);
  spec.set_beta2(0.95);
  spec.set_epsilon(1e-8);
  spec.set_weight_decay(0.1);
  return spec;
}

// A store with fresh weights, gradients and an optimizer.
struct Trained {
  explicit Trained(const cluster::v1::OptimizerSpec& spec = Spec())
      : store(*ParseModelConfig(TinyConfig().dump()),
              PartRange{.first_layer = 0, .end_layer = 4, .has_embedding = true, .has_head = true, .has_vision = true}) {
    DrawFreshWeights(3, store);
    store.ZeroGradients();
    const auto rules = AssignUpdateRules(spec, store.specs(), store.specs());
    EXPECT_TRUE(rules.ok()) << rules.status();
    optimizer = std::make_unique<Optimizer>(&store, spec, *rules);
  }
  // The gradients of a step, the same for every store.
  void SetGradients(int step) {
    torch::NoGradGuard no_grad;
    uint64_t seed = static_cast<uint64_t>(step) * 1000;
    for (const TensorSpec& spec : store.specs()) {
      if (!spec.trainable) continue;
      torch::Generator generator = at::make_generator<at::CPUGeneratorImpl>(++seed);
      store.PublishedGradient(spec.name).normal_(0, 0.1, generator);
    }
  }
  torch::Tensor Copy(const char* name) { return store.PublishedValue(name).detach().clone(); }

  ParameterStore store;
  std::unique_ptr<Optimizer> optimizer;
};

TEST(OptimizerTest, MatchesTorchsAdamWOverSeveralStepsWithClippingAndGroups) {
  cluster::v1::OptimizerSpec spec = Spec();
  auto& group = *spec.add_groups();
  group.set_match("vision");
  group.set_learning_rate(5e-3);
  group.set_weight_decay(0);
  Trained ours(spec);

  Trained theirs(spec);
  std::vector<torch::Tensor> vision, others;
  for (const Parameter& parameter : theirs.store.parameters()) {
    if (!parameter.trainable) continue;
    (parameter.published.front().part == ModelPartKind::kVision ? vision : others).push_back(parameter.value);
  }
  auto options = [&](double rate, double decay) {
    return torch::optim::AdamWOptions(rate).betas({0.9, 0.95}).eps(1e-8).weight_decay(decay);
  };
  torch::optim::AdamW reference_vision(vision, options(5e-3, 0)), reference_others(others, options(1e-2, 0.1));

  for (int step = 0; step < 5; ++step) {
    const double clip = step % 2 == 0 ? 1.0 : 0.25;
    const double factor = 1.0 / (1 + step);
    ours.SetGradients(step);
    theirs.SetGradients(step);
    ours.optimizer->Step(clip, factor);
    torch::NoGradGuard no_grad;
    for (const auto& list : {vision, others}) {
      for (const torch::Tensor& parameter : list) parameter.grad().mul_(clip);
    }
    for (auto& [optimizer, rate] : {std::pair<torch::optim::AdamW*, double>{&reference_vision, 5e-3}, {&reference_others, 1e-2}}) {
      static_cast<torch::optim::AdamWOptions&>(optimizer->param_groups()[0].options()).lr(rate * factor);
      torch::AutoGradMode graph(true);
      optimizer->step();
    }
  }
  EXPECT_EQ(ours.optimizer->steps(), 5U);
  for (const TensorSpec& tensor : ours.store.specs()) {
    const torch::Tensor a = ours.store.PublishedValue(tensor.name), b = theirs.store.PublishedValue(tensor.name);
    // The fused kernel rounds in another order: a few units in the last place of the step and of the weight.
    EXPECT_TRUE(torch::allclose(a, b, 1e-5, 1e-7)) << tensor.name << " differs by " << (a - b).abs().max().item<float>();
  }
}

TEST(OptimizerTest, TheFirstStepIsTheRateTimesTheSignAndTheDecay) {
  Trained trained;
  torch::NoGradGuard no_grad;
  const torch::Tensor before = trained.Copy(kQuery);
  trained.store.PublishedGradient(kQuery).fill_(-3);
  trained.optimizer->Step(1, 1);
  const torch::Tensor expected = before * (1 - 1e-2 * 0.1) + 1e-2;
  EXPECT_TRUE(torch::allclose(trained.store.PublishedValue(kQuery), expected, 1e-6, 1e-7));
}

TEST(OptimizerTest, AnExpertOfAStackMovesByItsOwnGradient) {
  cluster::v1::OptimizerSpec spec = Spec();
  spec.set_weight_decay(0);
  Trained trained(spec);
  torch::NoGradGuard no_grad;
  const char* neighbour = "language_model.model.layers.2.mlp.experts.4.down_proj.weight";
  const torch::Tensor expert = trained.Copy(kExpert), other = trained.Copy(neighbour);
  trained.store.PublishedGradient(kExpert).fill_(1);
  trained.optimizer->Step(1, 1);
  EXPECT_FALSE(torch::equal(trained.store.PublishedValue(kExpert), expert));
  EXPECT_TRUE(torch::equal(trained.store.PublishedValue(neighbour), other));
}

TEST(OptimizerTest, FrozenTensorsKeepTheirBytesAndHaveNoState) {
  cluster::v1::OptimizerSpec spec = Spec();
  auto& group = *spec.add_groups();
  group.set_match("vision");
  group.set_frozen(true);
  Trained trained(spec), all;
  const torch::Tensor patches = trained.Copy(kPatches), projector = trained.Copy(kProjector);
  trained.SetGradients(1);
  trained.optimizer->Step(1, 1);
  EXPECT_TRUE(torch::equal(trained.store.PublishedValue(kPatches), patches));
  EXPECT_FALSE(torch::equal(trained.store.PublishedValue(kProjector), projector));
  EXPECT_LT(trained.optimizer->state_bytes(), all.optimizer->state_bytes());
  for (const StoredTensor& tensor : trained.optimizer->State()) EXPECT_THAT(tensor.name, testing::Not(HasSubstr("vision_tower")));
}

TEST(OptimizerTest, APartWithoutWorkStaysWhereItIsOrDecaysAsAsked) {
  Trained idle, stepped;
  const torch::Tensor patches = idle.Copy(kPatches), query = idle.Copy(kQuery);
  for (Trained* trained : {&idle, &stepped}) {
    torch::NoGradGuard no_grad;
    trained->SetGradients(1);
    trained->store.PublishedGradient(kPatches).zero_();
  }
  idle.optimizer->Step(1, 1, /*move_vision=*/false, /*move_decoder=*/true);
  stepped.optimizer->Step(1, 1, /*move_vision=*/true, /*move_decoder=*/true);
  EXPECT_TRUE(torch::equal(idle.store.PublishedValue(kPatches), patches));
  EXPECT_FALSE(torch::equal(idle.store.PublishedValue(kQuery), query));
  // With zero gradients only the decay is left.
  EXPECT_TRUE(torch::allclose(stepped.store.PublishedValue(kPatches), patches * (1 - 1e-2 * 0.1), 1e-6, 0));
  EXPECT_FALSE(torch::equal(stepped.store.PublishedValue(kPatches), patches));
}

std::string StateFile(const std::string& name, const Optimizer& optimizer, bool first_half, bool second_half) {
  const std::vector<StoredTensor> state = optimizer.State();
  std::vector<StoredTensor> chosen;
  for (size_t i = 0; i < state.size(); ++i) {
    if (i < state.size() / 2 ? first_half : second_half) chosen.push_back(state[i]);
  }
  const std::string path = absl::StrCat(testing::TempDir(), "/optimizer_test_", ::getpid(), "_", name);
  EXPECT_TRUE(WriteSafetensors(path, chosen).ok());
  return path;
}

std::vector<SafetensorsFile> OpenAll(const std::vector<std::string>& paths) {
  std::vector<SafetensorsFile> files;
  for (const std::string& path : paths) {
    auto file = SafetensorsFile::Open(path);
    EXPECT_TRUE(file.ok()) << file.status();
    files.push_back(*std::move(file));
  }
  return files;
}

TEST(OptimizerTest, AStateThatIsLoadedGoesOnBitForBit) {
  Trained undisturbed, resumed;
  for (int step = 0; step < 3; ++step) {
    undisturbed.SetGradients(step);
    undisturbed.optimizer->Step(0.5, 1);
  }
  // Two files, as two workers would have written them.
  const auto files = OpenAll({StateFile("one", *undisturbed.optimizer, true, false), StateFile("two", *undisturbed.optimizer, false, true)});
  ASSERT_TRUE(resumed.optimizer->LoadState(files, undisturbed.optimizer->steps()).ok());
  {
    torch::NoGradGuard no_grad;
    for (const TensorSpec& spec : resumed.store.specs()) {
      resumed.store.PublishedValue(spec.name).copy_(undisturbed.store.PublishedValue(spec.name));
    }
  }
  for (int step = 3; step < 5; ++step) {
    for (Trained* trained : {&undisturbed, &resumed}) {
      trained->SetGradients(step);
      trained->optimizer->Step(0.5, 1);
    }
  }
  EXPECT_EQ(resumed.optimizer->steps(), 5U);
  for (const TensorSpec& spec : resumed.store.specs()) {
    EXPECT_TRUE(torch::equal(resumed.store.PublishedValue(spec.name), undisturbed.store.PublishedValue(spec.name))) << spec.name;
  }
}

TEST(OptimizerTest, AStateWithoutATensorIsRefusedByName) {
  Trained trained, other;
  const auto files = OpenAll({StateFile("half", *trained.optimizer, true, false)});
  const absl::Status refused = other.optimizer->LoadState(files, 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("exp_avg"), HasSubstr("none of the 1 optimizer files"), HasSubstr("frozen")));
}

TEST(OptimizerTest, AStateOfAnotherShapeIsRefusedWithBothShapes) {
  Trained trained;
  std::vector<StoredTensor> state = trained.optimizer->State();
  const std::string shape = state[0].ToString();
  std::swap(state[0].shape.front(), state[0].shape.back());
  ASSERT_NE(state[0].ToString(), shape);
  const std::string path = absl::StrCat(testing::TempDir(), "/optimizer_test_", ::getpid(), "_shape");
  ASSERT_TRUE(WriteSafetensors(path, state).ok());
  const absl::Status refused = trained.optimizer->LoadState(OpenAll({path}), 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr(state[0].ToString()), HasSubstr(shape)));
}

}  // namespace
}  // namespace moonpipe
