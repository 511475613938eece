// Whole passes over the small recorded model: split, repeated, with idle experts, and with pictures given in different ways.
#include <torch/torch.h>

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/model/label_shift.h"
#include "moonpipe/model/loss.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using ::testing::HasSubstr;
using testing::Fixture;
using testing::FixtureCase;
using torch::Tensor;

class PartsTest : public ::testing::Test {
 protected:
  PartsTest() : fixture_("kimi_vl_a3b") { testing::PinArithmetic(); }

  Fixture fixture_;
};

struct StepResult {
  Tensor loss;
  std::map<std::string, Tensor> gradients;
  std::vector<ExpertLoad> loads;
};

void Collect(const ParameterStore& store, StepResult* result) {
  for (const Parameter& parameter : store.parameters()) {
    if (parameter.trainable) result->gradients[parameter.name] = parameter.value.grad().clone();
  }
}

StepResult RunWhole(ParameterStore& store, const FixtureCase& input) {
  store.ZeroGradients();
  VisionTower tower(store);
  DecoderPart decoder(store);
  const Tensor features = input.has_media ? tower.Forward(input.pixels, input.grids) : Tensor();
  DecoderInput whole{input.ids_T, input.document_lengths, features};
  whole.skip_head = whole.last_hidden = true;
  const DecoderOutput output = decoder.Forward(whole);
  StepResult result;
  const Loss loss = HeadCrossEntropy(output.last_hidden_TH, store.HeadWeight(), input.labels_T);
  loss.sum.backward();
  result.loss = loss.sum.detach();
  result.loads = output.loads;
  Collect(store, &result);
  return result;
}

void ExpectSameBits(const StepResult& got, const StepResult& want) {
  EXPECT_TRUE(torch::equal(got.loss, want.loss));
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, gradient] : want.gradients) EXPECT_TRUE(torch::equal(got.gradients.at(name), gradient)) << name;
}

TEST_F(PartsTest, ThreePartsGiveTheBitsOfOne) {
  const FixtureCase input = fixture_.Case("packed");
  ParameterStore whole = fixture_.Load();
  const StepResult want = RunWhole(whole, input);

  ParameterStore vision = fixture_.Load({0, 0, false, false, true});
  ParameterStore first = fixture_.Load({0, 2, true, false, false});
  ParameterStore last = fixture_.Load({2, 4, false, true, false});
  EXPECT_EQ(vision.specs().size() + first.specs().size() + last.specs().size(), whole.specs().size());
  VisionTower tower(vision);
  DecoderPart first_part(first);
  DecoderPart last_part(last);
  const Tensor features = tower.Forward(input.pixels, input.grids);
  const Tensor received_features = features.detach().set_requires_grad(true);
  const Tensor hidden = first_part.Forward({input.ids_T, input.document_lengths, received_features}).hidden_or_logits;
  const Tensor received_hidden = hidden.detach().set_requires_grad(true);
  StepResult got;
  const Loss loss = testing::LossOf(last_part, last, {received_hidden, input.document_lengths, {}}, input.labels_T);
  loss.sum.backward();
  hidden.backward(received_hidden.grad());
  features.backward(received_features.grad());
  got.loss = loss.sum.detach();
  for (const ParameterStore* store : {&vision, &first, &last}) Collect(*store, &got);
  ExpectSameBits(got, want);
}

TEST_F(PartsTest, TwoThreadsGiveTheSameBitsTwice) {
  testing::PinArithmetic(2);
  const FixtureCase input = fixture_.Case("packed");
  ParameterStore store = fixture_.Load();
  const StepResult want = RunWhole(store, input);
  const Tensor shift_the_allocator = torch::empty({1237});
  ExpectSameBits(RunWhole(store, input), want);
}

TEST_F(PartsTest, IdleExpertsHaveZeroGradientsAndEveryValueIsFinite) {
  for (const int64_t tokens : {1, 40}) {
    FixtureCase input = fixture_.Case("text_only");
    input.ids_T = input.ids_T.narrow(0, 0, tokens);
    input.labels_T = torch::full({tokens}, 17, torch::kLong);
    input.document_lengths = {tokens};
    ModelConfig config = fixture_.config();
    ParameterStore store = fixture_.Load();
    std::vector<std::string> idle;
    for (const Parameter& parameter : store.parameters()) {
      if (!parameter.trainable) parameter.value.detach().zero_().narrow(0, 0, 3).fill_(10);
      if (parameter.is_stack()) idle.push_back(parameter.name);
    }
    EXPECT_EQ(idle.size(), 9u);
    // Freed memory full of NaN, in the sizes that the pass is going to ask for.
    for (int round = 0; round < 3; ++round) {
      std::vector<Tensor> dirty;
      for (int64_t size = 1; size <= (1 << 20); size *= 2) dirty.push_back(torch::full({size}, std::numeric_limits<float>::quiet_NaN()));
    }
    const StepResult result = RunWhole(store, input);
    ASSERT_EQ(result.loads.size(), 3u);
    for (const ExpertLoad& load : result.loads) {
      EXPECT_TRUE(torch::equal(load.counts_E, torch::tensor({tokens, tokens, tokens, 0L, 0L, 0L, 0L, 0L}, torch::kLong))) << load.counts_E;
    }
    EXPECT_TRUE(std::isfinite(result.loss.item<float>()));
    for (const auto& [name, gradient] : result.gradients) EXPECT_TRUE(gradient.isfinite().all().item<bool>()) << name;
    for (const std::string& name : idle) {
      EXPECT_TRUE(torch::equal(result.gradients.at(name).narrow(0, 3, 5), torch::zeros_like(result.gradients.at(name).narrow(0, 3, 5)))) << name;
      EXPECT_GT(result.gradients.at(name).narrow(0, 0, 3).abs().max().item<float>(), 0) << name;
    }
  }
}

TEST_F(PartsTest, BytePixelsAreNormalisedByTheTower) {
  ParameterStore store = fixture_.Load();
  VisionTower tower(store);
  torch::manual_seed(3);
  const Tensor bytes = torch::randint(0, 256, {8 + 24, 3, 14, 14}, torch::kByte);
  const std::vector<PatchGrid> grids = {{1, 2, 4}, {1, 6, 4}};
  const Tensor want = tower.Forward((bytes.to(torch::kFloat) / 255 - 0.5) / 0.5, grids);
  EXPECT_TRUE(torch::equal(tower.Forward(bytes, grids), want));
  EXPECT_EQ(want.size(0), 8);
}

TEST_F(PartsTest, PicturesDoNotSeeEachOther) {
  ParameterStore store = fixture_.Load();
  VisionTower tower(store);
  torch::manual_seed(3);
  const Tensor pixels = torch::randn({16 + 24 + 16, 3, 14, 14});
  const Tensor together = tower.Forward(pixels, {{1, 4, 4}, {1, 6, 4}, {1, 4, 4}});
  EXPECT_TRUE(torch::allclose(together.narrow(0, 0, 4), tower.Forward(pixels.narrow(0, 0, 16), {{1, 4, 4}}), 1e-4, 1e-5));
  EXPECT_TRUE(torch::allclose(together.narrow(0, 4, 6), tower.Forward(pixels.narrow(0, 16, 24), {{1, 6, 4}}), 1e-4, 1e-5));
  EXPECT_TRUE(torch::allclose(together.narrow(0, 10, 4), tower.Forward(pixels.narrow(0, 40, 16), {{1, 4, 4}}), 1e-4, 1e-5));
}

TEST_F(PartsTest, RowsThatDoNotAddUpAreRefusedWithBothNumbers) {
  ParameterStore store = fixture_.Load();
  VisionTower tower(store);
  DecoderPart decoder(store);
  const auto error_of = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  };
  const Tensor ids = torch::full({10}, 9, torch::kLong);
  EXPECT_THAT(error_of([&] { decoder.Forward({ids, {4, 5}, {}}); }), HasSubstr("documents of 9 tokens in all, but the input has 10 rows"));
  EXPECT_THAT(error_of([&] { decoder.Forward({ids, {10}, torch::zeros({2, 64})}); }), HasSubstr("2 feature rows, but the tokens have 0"));
  EXPECT_THAT(error_of([&] { tower.Forward(torch::zeros({15, 3, 14, 14}), {{1, 4, 4}}); }), HasSubstr("16 patches"));
  EXPECT_THAT(error_of([&] { tower.Forward(torch::zeros({12, 3, 14, 14}), {{1, 3, 4}}); }), HasSubstr("multiples of 2 and 2"));
  // This tower has no positions in time.
  EXPECT_THAT(error_of([&] { tower.Forward(torch::zeros({32, 3, 14, 14}), {{2, 4, 4}}); }), HasSubstr("2 frames, this tower takes 1"));
}

TEST_F(PartsTest, TheHeadMultipliesOnlyTheRowsThatAreKept) {
  ParameterStore store = fixture_.Load();
  DecoderPart decoder(store);
  const FixtureCase input = fixture_.Case("text_only");
  const torch::NoGradGuard no_grad;
  DecoderInput whole;
  whole.tokens_or_hidden = input.ids_T;
  whole.document_lengths = input.document_lengths;
  whole.last_hidden = true;
  const DecoderOutput all = decoder.Forward(whole);
  ASSERT_EQ(all.hidden_or_logits.size(0), input.ids_T.size(0));
  ASSERT_EQ(all.last_hidden_TH.size(0), input.ids_T.size(0));
  EXPECT_TRUE(torch::allclose(torch::mm(all.last_hidden_TH, store.HeadWeight().t()), all.hidden_or_logits, 1e-5, 1e-5));
  // What the head gave is shown: with fewer rows it multiplied fewer.
  int64_t multiplied = 0;
  decoder.set_observer([&](const std::string& name, const Tensor& value) {
    if (name == "logits") multiplied = value.size(0);
  });
  DecoderInput last = whole;
  last.last_hidden = false;
  last.logits_to_keep = 2;
  std::vector<int64_t> rows;
  int64_t end = 0;
  for (const int64_t length : input.document_lengths) {
    end += length;
    rows.insert(rows.end(), {end - 2, end - 1});
  }
  const DecoderOutput two = decoder.Forward(last);
  EXPECT_EQ(multiplied, static_cast<int64_t>(rows.size()));
  EXPECT_FALSE(two.last_hidden_TH.defined());
  EXPECT_TRUE(torch::allclose(two.hidden_or_logits, all.hidden_or_logits.index_select(0, torch::tensor(rows, torch::kLong)), 1e-5, 1e-5));
  DecoderInput chosen = whole;
  chosen.logit_rows = torch::tensor({7, 0, 3}, torch::kLong);
  EXPECT_TRUE(torch::allclose(decoder.Forward(chosen).hidden_or_logits, all.hidden_or_logits.index_select(0, chosen.logit_rows), 1e-5, 1e-5));
  EXPECT_EQ(multiplied, 3);
}

TEST_F(PartsTest, InputEmbeddingsStandForTokens) {
  ParameterStore store = fixture_.Load();
  DecoderPart decoder(store);
  const FixtureCase input = fixture_.Case("text_only");
  const torch::NoGradGuard no_grad;
  DecoderInput tokens, embeddings;
  tokens.tokens_or_hidden = input.ids_T;
  tokens.document_lengths = embeddings.document_lengths = input.document_lengths;
  embeddings.embeddings_TH = store.Get(store.decoder_prefix() + "embed_tokens.weight").index_select(0, input.ids_T);
  EXPECT_TRUE(torch::equal(decoder.Forward(embeddings).hidden_or_logits, decoder.Forward(tokens).hidden_or_logits));
  embeddings.tokens_or_hidden = input.ids_T;
  EXPECT_THROW(decoder.Forward(embeddings), c10::Error);
}

TEST_F(PartsTest, TextAloneLeavesTheEmbeddingsAsTheyAre) {
  ParameterStore store = fixture_.Load();
  DecoderPart decoder(store);
  const FixtureCase input = fixture_.Case("text_only");
  Tensor seen;
  decoder.set_observer([&](const std::string& name, const Tensor& value) {
    if (name == "inputs_embeds") seen = value;
  });
  decoder.Forward({input.ids_T, input.document_lengths, {}});
  EXPECT_TRUE(torch::equal(seen, store.Get(store.decoder_prefix() + "embed_tokens.weight").index_select(0, input.ids_T)));
}

TEST_F(PartsTest, PinnedRoutingReplacesTheRoutersChoices) {
  ParameterStore store = fixture_.Load();
  DecoderPart decoder(store);
  const FixtureCase input = fixture_.Case("text_only");
  const torch::NoGradGuard no_grad;
  const int64_t tokens = input.ids_T.size(0), chosen = fixture_.config().text.num_experts_per_tok;
  const DecoderInput given{input.ids_T, input.document_lengths, {}};
  const DecoderOutput free = decoder.Forward(given);
  decoder.PinRouting(2, torch::arange(chosen, torch::kLong).unsqueeze(0).expand({tokens, chosen}));
  const DecoderOutput pinned = decoder.Forward(given);
  for (const ExpertLoad& load : pinned.loads) {
    if (load.layer == 2) {
      EXPECT_EQ(load.counts_E.narrow(0, 0, chosen).sum().item<int64_t>(), tokens * chosen);
    }
  }
  EXPECT_FALSE(torch::equal(free.hidden_or_logits, pinned.hidden_or_logits));
  decoder.PinRouting(2, {});
  EXPECT_TRUE(torch::equal(free.hidden_or_logits, decoder.Forward(given).hidden_or_logits));
  decoder.PinRouting(2, torch::zeros({tokens - 1, chosen}, torch::kLong));
  EXPECT_THROW(decoder.Forward(given), c10::Error);
}

TEST_F(PartsTest, LabelsAreShiftedWithinTheirDocuments) {
  const Tensor labels = torch::tensor({1, 2, -100, 4, 5, 6}, torch::kLong);
  EXPECT_TRUE(torch::equal(ShiftLabels(labels, {3, 3}, -100), torch::tensor({2, -100, -100, 5, 6, -100}, torch::kLong)));
  EXPECT_TRUE(torch::equal(ShiftLabels(labels, {6}, 5), torch::tensor({2, -100, 4, -100, 6, -100}, torch::kLong)));
  EXPECT_TRUE(torch::equal(ShiftLabels(labels, {1, 5}, -100), torch::tensor({-100, -100, 4, 5, 6, -100}, torch::kLong)));
  EXPECT_THROW(ShiftLabels(labels, {5}, -100), c10::Error);
}

TEST_F(PartsTest, TheBiasOfALayerMovesByItsLoads) {
  ParameterStore store = fixture_.Load();
  DecoderPart decoder(store);
  const Tensor bias = store.Get("language_model.model.layers.2.mlp.gate.e_score_correction_bias");
  const Tensor before = bias.clone();
  decoder.UpdateCorrection(2, torch::tensor({8, 0, 4, 4, 4, 4, 4, 4}, torch::kLong), 0.5);
  EXPECT_TRUE(torch::allclose(bias - before, torch::tensor({-0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0}).to(torch::kFloat), 0, 1e-6));
}

TEST_F(PartsTest, ATiedHeadHasAGradientOfItsOwnAndTheEmbeddingsValues) {
  ModelConfig config = fixture_.config();
  config.text.tie_word_embeddings = true;
  ParameterStore store(config, testing::WholeModel(config));
  for (const Parameter& parameter : store.parameters()) parameter.value.detach().normal_(0, 0.05);
  store.ZeroGradients();
  DecoderPart decoder(store);
  const Tensor ids = torch::tensor({9, 10, 11, 12}, torch::kLong);
  testing::LossOf(decoder, store, {ids, {4}, {}}, ids).sum.backward();
  const Tensor embedding = store.Get("language_model.model.embed_tokens.weight");
  EXPECT_EQ(store.HeadWeight().data_ptr(), embedding.data_ptr());
  EXPECT_EQ(embedding.grad().abs().sum(1).nonzero().size(0), 4);
  EXPECT_EQ(store.tied_head().grad().abs().sum(1).nonzero().size(0), config.text.vocab_size);
}

}  // namespace
}  // namespace moonpipe
