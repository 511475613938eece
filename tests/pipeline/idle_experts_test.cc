// Experts that no token chooses, in a whole decoder and a whole step: exact zeros, no byte moved, nothing that is not a number.
#include <torch/torch.h>

#include <limits>

#include "gtest/gtest.h"
#include "moonpipe/model/decoder_part.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/train/gradients.h"
#include "moonpipe/train/optimizer.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

// What memory held before must reach nothing: blocks of many sizes are filled with NaN and given back.
void FillFreedMemoryWithNotANumber() {
  std::vector<torch::Tensor> blocks;
  for (int64_t size = 1; size < (1 << 16); size = size * 3 / 2 + 1) {
    for (int copy = 0; copy < 4; ++copy) blocks.push_back(torch::full({size}, std::numeric_limits<float>::quiet_NaN()));
  }
}

class IdleExpertsTest : public testing::TestWithParam<int64_t> {};

TEST_P(IdleExpertsTest, HaveZeroGradientsAndKeepTheirBytes) {
  const int64_t tokens = GetParam();
  torch::set_num_threads(1);
  const auto config = ParseModelConfig(TinyConfig().dump());
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_EQ(config->text.num_experts_per_tok, 2);
  ParameterStore store(*config, {0, config->text.num_hidden_layers, true, true, false});
  DrawFreshWeights(5, store);
  for (const Parameter& parameter : store.parameters()) {
    if (parameter.name.find("e_score_correction_bias") == std::string::npos) continue;
    torch::NoGradGuard no_grad;
    torch::Tensor(parameter.value).zero_().narrow(0, 0, 2).fill_(10);
  }
  cluster::v1::OptimizerSpec spec;
  spec.set_learning_rate(1e-2);
  spec.set_beta1(0.9);
  spec.set_beta2(0.95);
  spec.set_epsilon(1e-8);
  spec.set_weight_decay(0);
  const auto rules = AssignUpdateRules(spec, store.specs(), ListTensors(*config));
  ASSERT_TRUE(rules.ok()) << rules.status();
  GradientAccumulator gradients(&store, 1);
  Optimizer optimizer(&store, spec, *rules);
  std::map<std::string, torch::Tensor> before;
  for (const TensorSpec& tensor : store.specs()) before[tensor.name] = store.PublishedValue(tensor.name).detach().clone();

  DecoderPart decoder(store);
  gradients.Begin();
  FillFreedMemoryWithNotANumber();
  const torch::Tensor ids = torch::arange(tokens) % 300;
  DecoderInput input;
  input.tokens_or_hidden = ids;
  input.document_lengths = {tokens};
  const DecoderOutput output = decoder.Forward(input);
  FillFreedMemoryWithNotANumber();
  const torch::Tensor loss = at::cross_entropy_loss(output.hidden_or_logits, (ids + 1) % 300);
  loss.backward();
  gradients.Finish();
  optimizer.Step(1, 1, true, true);

  EXPECT_TRUE(std::isfinite(loss.item<float>()));
  ASSERT_EQ(output.loads.size(), 3u);
  for (const ExpertLoad& load : output.loads) {
    const torch::Tensor expected = torch::zeros({8}, torch::kLong);
    expected.narrow(0, 0, 2).fill_(tokens);
    EXPECT_TRUE(torch::equal(load.counts_E, expected)) << load.counts_E;
  }
  int64_t idle = 0;
  for (const TensorSpec& tensor : store.specs()) {
    const torch::Tensor value = store.PublishedValue(tensor.name);
    EXPECT_TRUE(value.isfinite().all().item<bool>()) << tensor.name;
    if (!tensor.trainable) continue;
    const torch::Tensor gradient = store.PublishedGradient(tensor.name);
    EXPECT_TRUE(gradient.isfinite().all().item<bool>()) << tensor.name;
    if (tensor.expert >= 2) {
      EXPECT_EQ(gradient.count_nonzero().item<int64_t>(), 0) << tensor.name;
      EXPECT_TRUE(torch::equal(value, before[tensor.name])) << tensor.name;
      ++idle;
    } else if (tensor.expert >= 0) {
      EXPECT_GT(gradient.count_nonzero().item<int64_t>(), 0) << tensor.name;
      EXPECT_FALSE(torch::equal(value, before[tensor.name])) << tensor.name;
    }
  }
  EXPECT_EQ(idle, 3 * 6 * 3);  // layers, experts, matrices
}

// A microbatch of one token as well.
INSTANTIATE_TEST_SUITE_P(Tokens, IdleExpertsTest, testing::Values(1, 40));

}  // namespace
}  // namespace moonpipe
