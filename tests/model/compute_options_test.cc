// Choices that change how a model computes and not what.
#include <torch/torch.h>

#include "gtest/gtest.h"
#include "moonpipe/model/loss.h"
#include "moonpipe/model/norms.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using testing::Fixture;
using testing::FixtureCase;
using torch::Tensor;

struct Pass {
  double loss = 0;
  Tensor logits;
  std::map<std::string, Tensor> gradients;
};

Pass RunPass(const Fixture& fixture, const std::string& name, const ComputeOptions& compute) {
  testing::PinArithmetic();
  const FixtureCase input = fixture.Case(name);
  ParameterStore store = fixture.Load();
  store.set_compute(compute);
  store.ZeroGradients();
  DecoderPart decoder(store);
  DecoderInput in{input.ids_T, input.document_lengths, {}};
  if (fixture.config().vision.has_value()) {
    VisionTower tower(store);
    in.features_MH = tower.Forward(input.pixels, input.grids);
  }
  in.last_hidden = true;
  const DecoderOutput output = decoder.Forward(in);
  const Tensor& logits = output.hidden_or_logits;
  const Tensor loss = HeadCrossEntropy(output.last_hidden_TH, store.HeadWeight(), input.labels_T).sum / input.trained;
  loss.backward();
  Pass pass{loss.item<double>(), logits.detach(), {}};
  for (const TensorSpec& tensor : store.specs()) {
    if (!tensor.trainable) continue;
    const Tensor gradient = store.PublishedGradient(tensor.name);
    EXPECT_EQ(gradient.scalar_type(), torch::kFloat) << tensor.name;
    pass.gradients[tensor.name] = gradient.clone();
  }
  return pass;
}

double RelativeNorm(const Tensor& a, const Tensor& b) { return ((a - b).norm() / b.norm().clamp_min(1e-12)).item<double>(); }

void ExpectSameUpToRounding(const Pass& a, const Pass& b, double tolerance) {
  EXPECT_NEAR(a.loss, b.loss, tolerance * b.loss);
  EXPECT_LT(RelativeNorm(a.logits.to(torch::kFloat), b.logits), tolerance);
  for (const auto& [name, gradient] : b.gradients) EXPECT_LT((a.gradients.at(name) - gradient).abs().max().item<double>(), tolerance) << name;
}

TEST(ComputeOptionsTest, ExpertsOneByOneGiveTheNumbersOfSortedOnes) {
  const Fixture fixture("kimi_vl_a3b");
  ComputeOptions loop;
  loop.loop_experts = true;
  const Pass sorted = RunPass(fixture, "two_images", {}), looped = RunPass(fixture, "two_images", loop);
  ExpectSameUpToRounding(looped, sorted, 2e-5);
}

TEST(ComputeOptionsTest, AttentionInStepsGivesTheNumbersOfTheKernel) {
  const Fixture fixture("kimi_vl_a3b");
  ComputeOptions steps;
  steps.explicit_attention = true;
  ExpectSameUpToRounding(RunPass(fixture, "two_images", steps), RunPass(fixture, "two_images", {}), 2e-5);
}

TEST(ComputeOptionsTest, Bf16StaysCloseToFp32AndItsGradientsLandInFp32) {
  const Fixture fixture("kimi_vl_a3b");
  ComputeOptions bf16;
  bf16.dtype = torch::kBFloat16;
  const Pass half = RunPass(fixture, "two_images", bf16), full = RunPass(fixture, "two_images", {});
  EXPECT_EQ(half.logits.scalar_type(), torch::kBFloat16);
  // 8 bits of mantissa: 0.4 % a rounding, a few dozen roundings deep; a choice of experts may flip where two scores lie close.
  EXPECT_NEAR(half.loss, full.loss, 0.01 * full.loss);
  EXPECT_LT(RelativeNorm(half.logits.to(torch::kFloat), full.logits), 0.1);
  EXPECT_GT(RelativeNorm(half.logits.to(torch::kFloat), full.logits), 1e-4) << "nothing was rounded";
  for (const char* name : {"language_model.lm_head.weight", "language_model.model.layers.0.self_attn.o_proj.weight"}) {
    EXPECT_LT(RelativeNorm(half.gradients.at(name), full.gradients.at(name)), 0.2) << name;
  }
}

TEST(ComputeOptionsTest, TheRouterComputesInFp32AlsoInBf16) {
  testing::PinArithmetic();
  const Fixture fixture("moonlight");
  const FixtureCase input = fixture.Case("packed");
  ParameterStore store = fixture.Load();
  ComputeOptions bf16;
  bf16.dtype = torch::kBFloat16;
  store.set_compute(bf16);
  DecoderPart decoder(store);
  int seen = 0;
  decoder.set_observer([&seen](const std::string& name, const Tensor& value) {
    if (name.find("router.") == std::string::npos || name.find(".indices") != std::string::npos) return;
    ++seen;
    ASSERT_EQ(value.scalar_type(), torch::kFloat) << name;
    // Numbers of a product in bf16 would be representable there.
    EXPECT_GT((value.to(torch::kBFloat16).to(torch::kFloat) != value).sum().item<int64_t>(), value.numel() / 2) << name;
  });
  torch::NoGradGuard no_grad;
  decoder.Forward({input.ids_T, input.document_lengths, {}});
  EXPECT_GE(seen, 2);
}

TEST(ComputeOptionsTest, TheTwoRoundingsOfRmsNormDifferByTheirDefinition) {
  torch::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1);
  const Tensor x = torch::empty({64, 32}).normal_(0, 1, generator).to(torch::kBFloat16);
  const Tensor weight = torch::empty({32}).normal_(1, 0.3, generator);
  const Tensor x32 = x.to(torch::kFloat), normed = x32 * (x32.square().mean(-1, true) + 1e-5).rsqrt();
  const Tensor before = RmsNorm(x, weight, 1e-5, NormRounding::kBeforeWeight), after = RmsNorm(x, weight, 1e-5, NormRounding::kAfterWeight);
  EXPECT_TRUE(torch::equal(before, normed.to(torch::kBFloat16) * weight.to(torch::kBFloat16)));
  EXPECT_TRUE(torch::equal(after, (normed * weight).to(torch::kBFloat16)));
  EXPECT_GT((before != after).sum().item<int64_t>(), 100);
  EXPECT_TRUE(torch::equal(RmsNorm(x32, weight, 1e-5, NormRounding::kBeforeWeight), RmsNorm(x32, weight, 1e-5, NormRounding::kAfterWeight)));
}

}  // namespace
}  // namespace moonpipe
