// QK-clip on the recorded models: heads above the threshold are scaled so that their largest logit becomes the threshold, and no other
// number of the model changes.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using testing::Fixture;
using testing::FixtureCase;
using torch::Tensor;

std::map<int64_t, std::vector<double>> LargestLogits(DecoderPart& decoder, const FixtureCase& input) {
  torch::NoGradGuard no_grad;
  DecoderInput in;
  in.tokens_or_hidden = input.ids_T;
  in.document_lengths = input.document_lengths;
  in.largest_logits = true;
  std::map<int64_t, std::vector<double>> logits;
  for (const HeadLogits& layer : decoder.Forward(in).logits) {
    const Tensor values = layer.largest_N.to(torch::kDouble);
    logits[layer.layer] = {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
  }
  return logits;
}

// Largest logit of each head of layer 0 from first principles: every product of every pair that attention looks at.
std::vector<double> LargestOfFirstLayer(const ParameterStore& store, const FixtureCase& input) {
  torch::NoGradGuard no_grad;
  const TextConfig& config = store.config().text;
  const std::string prefix = absl::StrCat(store.decoder_prefix(), "layers.0.");
  const auto get = [&](const std::string& name) { return store.PublishedValue(prefix + name).detach().to(torch::kDouble); };
  const auto norm = [](const Tensor& x, const Tensor& weight, double eps) { return x * (x.square().mean(-1, true) + eps).rsqrt() * weight; };
  const Tensor embedded = store.PublishedValue(store.decoder_prefix() + "embed_tokens.weight").detach().to(torch::kDouble).index_select(0, input.ids_T);
  const Tensor x = norm(embedded, get("input_layernorm.weight"), config.rms_norm_eps);
  const int64_t heads = config.num_attention_heads, nope = config.qk_nope_head_dim, rope = config.qk_rope_head_dim;
  Tensor q = config.q_lora_rank.has_value()
                 ? at::linear(norm(at::linear(x, get("self_attn.q_a_proj.weight")), get("self_attn.q_a_layernorm.weight"), 1e-6), get("self_attn.q_b_proj.weight"))
                 : at::linear(x, get("self_attn.q_proj.weight"));
  q = q.view({-1, heads, nope + rope});
  const Tensor latent = at::linear(x, get("self_attn.kv_a_proj_with_mqa.weight"));
  const Tensor k_nope = at::linear(norm(latent.narrow(1, 0, config.kv_lora_rank), get("self_attn.kv_a_layernorm.weight"), 1e-6), get("self_attn.kv_b_proj.weight"))
                            .view({-1, heads, nope + config.v_head_dim}).narrow(2, 0, nope);
  const Tensor k_rope = latent.narrow(1, config.kv_lora_rank, rope);
  std::vector<double> largest(static_cast<size_t>(heads), -1e30);
  int64_t first = 0;
  for (const int64_t length : input.document_lengths) {
    for (int64_t i = 0; i < length; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        for (int64_t head = 0; head < heads; ++head) {
          double logit = (q[first + i][head].narrow(0, 0, nope) * k_nope[first + j][head]).sum().item<double>();
          // Turning both by their positions turns the pair by the difference alone: adjacent values are one complex number.
          for (int64_t d = 0; d < rope / 2; ++d) {
            const double angle = static_cast<double>(i - j) / std::pow(config.rope_theta, 2.0 * static_cast<double>(d) / static_cast<double>(rope));
            const double qr = q[first + i][head][nope + 2 * d].item<double>(), qi = q[first + i][head][nope + 2 * d + 1].item<double>();
            const double kr = k_rope[first + j][2 * d].item<double>(), ki = k_rope[first + j][2 * d + 1].item<double>();
            logit += std::cos(angle) * (qr * kr + qi * ki) + std::sin(angle) * (qr * ki - qi * kr);
          }
          double& entry = largest[static_cast<size_t>(head)];
          entry = std::max(entry, logit / std::sqrt(static_cast<double>(nope + rope)));
        }
      }
    }
    first += length;
  }
  return largest;
}

// Two short documents of text.
FixtureCase ShortDocuments() {
  FixtureCase input;
  torch::Generator generator = at::make_generator<at::CPUGeneratorImpl>(5);
  input.ids_T = torch::randint(0, 100, {9}, generator, torch::kLong);
  input.document_lengths = {6, 3};
  return input;
}

TEST(QkClipTest, LargestLogitsAreThoseOfEveryVisiblePair) {
  testing::PinArithmetic();
  const Fixture fixture("moonlight");
  ParameterStore store = fixture.Load();
  DecoderPart decoder(store);
  const FixtureCase input = ShortDocuments();
  const auto logits = LargestLogits(decoder, input);
  ASSERT_EQ(static_cast<int64_t>(logits.size()), fixture.config().text.num_hidden_layers);
  const std::vector<double> wanted = LargestOfFirstLayer(store, input);
  ASSERT_EQ(logits.at(0).size(), wanted.size());
  for (size_t head = 0; head < wanted.size(); ++head) EXPECT_NEAR(logits.at(0)[head], wanted[head], 1e-4 * std::abs(wanted[head]) + 1e-6) << head;
}

TEST(QkClipTest, NothingIsRecordedUnlessAskedFor) {
  const Fixture fixture("moonlight");
  ParameterStore store = fixture.Load();
  DecoderPart decoder(store);
  const FixtureCase input = ShortDocuments();
  EXPECT_TRUE(decoder.Forward({input.ids_T, input.document_lengths, {}}).logits.empty());
}

TEST(QkClipTest, LayersWhoseQueriesOrKeysAreFrozenAreNotRecorded) {
  const Fixture fixture("moonlight");
  const FixtureCase input = ShortDocuments();
  for (const char* frozen : {"q_proj.weight", "kv_b_proj.weight"}) {
    ParameterStore store = fixture.Load();
    DecoderPart decoder(store);
    const std::string name = absl::StrCat(store.decoder_prefix(), "layers.1.self_attn.", frozen);
    bool found = false;
    for (const Parameter& parameter : store.parameters()) {
      if (parameter.published.front().name != name) continue;
      found = true;
      Tensor(parameter.value).requires_grad_(false);
    }
    ASSERT_TRUE(found) << name;
    const auto logits = LargestLogits(decoder, input);
    EXPECT_FALSE(logits.contains(1)) << frozen;
    EXPECT_TRUE(logits.contains(0)) << frozen;
  }
}

class QkClipModels : public ::testing::TestWithParam<const char*> {};

TEST_P(QkClipModels, ThreeHeadsAboveTheThresholdComeBackToItAndNothingElseChanges) {
  testing::PinArithmetic();
  const Fixture fixture(GetParam());
  ParameterStore store = fixture.Load();
  DecoderPart decoder(store);
  const FixtureCase input = ShortDocuments();
  const TextConfig& config = fixture.config().text;
  const int64_t layer = 1, nope = config.qk_nope_head_dim, rope = config.qk_rope_head_dim, value = config.v_head_dim;
  const std::string prefix = absl::StrCat(store.decoder_prefix(), "layers.", layer, ".self_attn.");
  const std::string query = prefix + (config.q_lora_rank.has_value() ? "q_b_proj.weight" : "q_proj.weight"), key = prefix + "kv_b_proj.weight";

  const std::vector<double> before = LargestLogits(decoder, input).at(layer);
  ASSERT_GE(before.size(), 4U);
  std::vector<double> sorted = before;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  ASSERT_GT(sorted[2], 0);
  const double threshold = (sorted[2] + std::max(sorted[3], 0.0)) / 2;  // three heads exceed it
  std::map<std::string, Tensor> old;
  for (const TensorSpec& tensor : store.specs()) old[tensor.name] = store.PublishedValue(tensor.name).detach().clone();

  EXPECT_EQ(decoder.ClipHeads(layer, before, threshold), 3);

  for (const TensorSpec& tensor : store.specs()) {
    const Tensor now = store.PublishedValue(tensor.name).detach();
    if (tensor.name != query && tensor.name != key) {
      EXPECT_TRUE(torch::equal(now, old[tensor.name])) << tensor.name;
      continue;
    }
    const int64_t width = tensor.name == query ? nope + rope : nope + value;
    for (size_t head = 0; head < before.size(); ++head) {
      const Tensor was = old[tensor.name].narrow(0, static_cast<int64_t>(head) * width, width), is = now.narrow(0, static_cast<int64_t>(head) * width, width);
      const double factor = threshold / before[head];
      if (factor >= 1) {
        EXPECT_TRUE(torch::equal(is, was)) << tensor.name << " head " << head;
        continue;
      }
      EXPECT_TRUE(torch::allclose(is.narrow(0, 0, nope), was.narrow(0, 0, nope) * std::sqrt(factor), 1e-6, 0)) << tensor.name << " head " << head;
      // Rotary query rows by the whole factor; value rows not at all.
      EXPECT_TRUE(torch::allclose(is.narrow(0, nope, width - nope), was.narrow(0, nope, width - nope) * (tensor.name == query ? factor : 1), 1e-6, 0))
          << tensor.name << " head " << head;
    }
  }
  const std::vector<double> after = LargestLogits(decoder, input).at(layer);
  for (size_t head = 0; head < before.size(); ++head) {
    EXPECT_NEAR(after[head], std::min(before[head], threshold), 1e-4 * std::abs(before[head])) << head;
  }
}

INSTANTIATE_TEST_SUITE_P(Recorded, QkClipModels, ::testing::Values("moonlight", "kimi_k2_5"));

}  // namespace
}  // namespace moonpipe
