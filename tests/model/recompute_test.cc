// What is made again in the backward gives the bits of what was kept.
#include "moonpipe/model/recompute.h"

#include <torch/torch.h>

#include <functional>

#include "gtest/gtest.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using testing::Fixture;
using testing::FixtureCase;
using torch::Tensor;

struct Pass {
  Tensor loss;
  std::map<std::string, Tensor> gradients;
  std::vector<ExpertLoad> loads;
  std::vector<HeadLogits> logits;
};

struct Setting {
  torch::Dtype dtype = torch::kFloat;
  bool freeze_blocks = false;  // of the tower, and the decoder's first layer
  // Between forward and backward, as the next microbatch's forward does it.
  std::function<void(DecoderPart&)> between = [](DecoderPart&) {};
  std::function<void(DecoderPart&)> before = [](DecoderPart&) {};
};

Pass RunPass(Recompute recompute, const Setting& setting) {
  testing::PinArithmetic();
  const Fixture fixture("kimi_vl_a3b");
  const FixtureCase input = fixture.Case("two_images");
  ParameterStore store = fixture.Load();
  ComputeOptions compute;
  compute.dtype = setting.dtype;
  compute.recompute = recompute;
  store.set_compute(compute);
  for (const Parameter& parameter : store.parameters()) {
    const bool frozen = parameter.name.find("encoder.blocks.") != std::string::npos || parameter.name.find("layers.0.") != std::string::npos;
    if (setting.freeze_blocks && frozen) parameter.value.set_requires_grad(false);
  }
  VisionTower tower(store);
  DecoderPart decoder(store);
  setting.before(decoder);
  DecoderInput in{input.ids_T, input.document_lengths, tower.Forward(input.pixels, input.grids)};
  in.skip_head = in.last_hidden = in.largest_logits = true;
  in.balance_scale = 0.1;
  const DecoderOutput out = decoder.Forward(in);
  const Tensor loss = HeadCrossEntropy(out.last_hidden_TH, store.HeadWeight(), input.labels_T).sum;
  setting.between(decoder);
  loss.backward();
  Pass pass{loss.detach(), {}, out.loads, out.logits};
  for (const Parameter& parameter : store.parameters()) {
    if (parameter.value.grad().defined()) pass.gradients[parameter.name] = parameter.value.grad();
  }
  return pass;
}

void ExpectSameBits(const Setting& setting) {
  const Pass kept = RunPass(Recompute::kNone, setting);
  for (const Recompute recompute : {Recompute::kExperts, Recompute::kLayers}) {
    const Pass again = RunPass(recompute, setting);
    EXPECT_TRUE(torch::equal(again.loss, kept.loss));
    ASSERT_EQ(again.gradients.size(), kept.gradients.size());
    for (const auto& [name, gradient] : kept.gradients) EXPECT_TRUE(torch::equal(again.gradients.at(name), gradient)) << name;
    ASSERT_EQ(again.loads.size(), kept.loads.size());
    for (size_t i = 0; i < kept.loads.size(); ++i) {
      EXPECT_TRUE(torch::equal(again.loads[i].counts_E, kept.loads[i].counts_E));
      EXPECT_TRUE(torch::equal(again.loads[i].balance_loss, kept.loads[i].balance_loss));
    }
    ASSERT_EQ(again.logits.size(), kept.logits.size());
    for (size_t i = 0; i < kept.logits.size(); ++i) EXPECT_TRUE(torch::equal(again.logits[i].largest_N, kept.logits[i].largest_N));
  }
}

TEST(RecomputeTest, LossGradientsAndRecordsHaveTheBitsOfWhatIsKept) { ExpectSameBits({}); }

TEST(RecomputeTest, AlsoInBf16) {
  Setting setting;
  setting.dtype = torch::kBFloat16;
  ExpectSameBits(setting);
}

TEST(RecomputeTest, FrozenBlocksAreNotMadeAgainForNothingAndTrainedOnesBehindThemAre) {
  Setting setting;
  setting.freeze_blocks = true;
  ExpectSameBits(setting);
}

TEST(RecomputeTest, TheChoicesPinnedForAMicrobatchHoldInItsBackward) {
  const int64_t tokens = Fixture("kimi_vl_a3b").Case("two_images").ids_T.size(0);
  const auto pin = [tokens](int64_t first) {
    return [tokens, first](DecoderPart& decoder) {
      decoder.PinRouting(1, torch::tensor({first, first + 1, first + 2}, torch::kLong).unsqueeze(0).repeat({tokens, 1}));
    };
  };
  Setting setting;
  setting.before = pin(0);
  setting.between = pin(3);
  ExpectSameBits(setting);
}

TEST(RecomputeTest, TheGraphKeepsTheInputAlone) {
  int calls = 0;
  const auto piece = [&](const Tensor& x, bool again) {
    EXPECT_EQ(again, calls == 1);
    EXPECT_EQ(at::GradMode::is_enabled(), again);
    ++calls;
    return x.exp();
  };
  const Tensor x = torch::ones({3}).set_requires_grad(true);
  const Tensor y = Recomputed(x, /*trained=*/false, piece);
  EXPECT_EQ(calls, 1);
  y.sum().backward();
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(torch::equal(x.grad(), torch::ones({3}).exp()));
}

TEST(RecomputeTest, AWeightIsTrainedBehindAnInputWithoutGradient) {
  const Tensor weight = torch::ones({3}).set_requires_grad(true);
  const Tensor x = torch::full({3}, 2.0f);
  Recomputed(x, AnyTrained({weight}), [&](const Tensor& input, bool) { return input * weight; }).sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), x));
  EXPECT_FALSE(x.grad().defined());
}

TEST(RecomputeTest, WithoutAnythingToTrainNothingIsMadeAgain) {
  const auto square = [](const Tensor& x, bool) { return x * x; };
  EXPECT_FALSE(Recomputed(torch::ones({3}), /*trained=*/false, square).requires_grad());
  const torch::NoGradGuard no_graph;
  EXPECT_FALSE(Recomputed(torch::ones({3}).set_requires_grad(true), /*trained=*/true, square).requires_grad());
}

}  // namespace
}  // namespace moonpipe
