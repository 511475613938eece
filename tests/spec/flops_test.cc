#include "moonpipe/spec/flops.h"

#include "gtest/gtest.h"

namespace moonpipe {
namespace {

// The small checkpoint of the requirements: width 64, one dense and three expert layers, a tower of two blocks.
ModelConfig SmallModel() {
  ModelConfig config;
  TextConfig& text = config.text;
  text.vocab_size = 320;
  text.hidden_size = 64;
  text.num_hidden_layers = 4;
  text.num_attention_heads = 4;
  text.kv_lora_rank = 16;
  text.qk_nope_head_dim = 8;
  text.qk_rope_head_dim = 4;
  text.v_head_dim = 8;
  text.intermediate_size = 128;
  text.moe_intermediate_size = 32;
  text.n_routed_experts = 8;
  text.num_experts_per_tok = 2;
  text.n_shared_experts = 1;
  text.first_k_dense_replace = 1;
  VisionConfig vision;
  vision.patch_size = 14;
  vision.num_attention_heads = 4;
  vision.num_hidden_layers = 2;
  vision.hidden_size = 32;
  vision.intermediate_size = 64;
  vision.merge_height = 2;
  vision.merge_width = 2;
  config.vision = vision;
  return config;
}

// MoonViT and the language model of Kimi-VL-A3B.
ModelConfig KimiVl() {
  ModelConfig config = SmallModel();
  TextConfig& text = config.text;
  text.vocab_size = 163840;
  text.hidden_size = 2048;
  text.num_hidden_layers = 27;
  text.num_attention_heads = 16;
  text.kv_lora_rank = 512;
  text.qk_nope_head_dim = 128;
  text.qk_rope_head_dim = 64;
  text.v_head_dim = 128;
  text.intermediate_size = 11264;
  text.moe_intermediate_size = 1408;
  text.n_routed_experts = 64;
  text.num_experts_per_tok = 6;
  text.n_shared_experts = 2;
  config.vision->num_attention_heads = 16;
  config.vision->num_hidden_layers = 27;
  config.vision->hidden_size = 1152;
  config.vision->intermediate_size = 4304;
  return config;
}

data::v1::StepManifest Job(std::vector<uint32_t> documents, uint32_t rows = 0, uint32_t columns = 0) {
  data::v1::StepManifest manifest;
  auto* microbatch = manifest.add_microbatches();
  uint32_t tokens = 0;
  for (uint32_t length : documents) {
    microbatch->add_document_lengths(length);
    tokens += length;
  }
  microbatch->set_tokens(tokens);
  if (rows > 0) {
    auto* grid = microbatch->add_grids();
    grid->set_frames(1);
    grid->set_rows(rows);
    grid->set_columns(columns);
    microbatch->set_feature_rows(rows * columns / 4);
  }
  return manifest;
}

TEST(FlopsTest, PicturesAddExactlyTheirPatchesTheirAttentionAndTheirPositions) {
  const ModelConfig model = SmallModel();
  const StepFlops text_only = CountTrainingFlops(model, Job({64}));
  const StepFlops small = CountTrainingFlops(model, Job({64}, 4, 4));
  const StepFlops large = CountTrainingFlops(model, Job({64}, 8, 8));
  EXPECT_EQ(text_only.vision, 0);
  EXPECT_EQ(text_only.projector, 0);
  EXPECT_EQ(small.vision, 3379200 + 196608);
  EXPECT_EQ(small.projector, 589824);
  EXPECT_EQ(small.total() - text_only.total(), 4165632);
  EXPECT_EQ(large.vision, 13516800 + 3145728);
  EXPECT_EQ(large.projector, 2359296);
  EXPECT_EQ(large.total() - text_only.total(), 19021824);
}

TEST(FlopsTest, TheDecoderCountsRealTokensAndUsedExperts) {
  const ModelConfig model = SmallModel();
  // Attention 64*48 + 64*20 + 16*64 + 32*64; dense 3*64*128; experts 64*8 + 3*64*32*(2+1).
  const int64_t attention = 3072 + 1280 + 1024 + 2048;
  EXPECT_EQ(ActiveLayerWeights(model.text, 0), attention + 24576);
  EXPECT_EQ(ActiveLayerWeights(model.text, 1), attention + 512 + 18432);
  const int64_t all = 4 * attention + 24576 + 3 * (512 + 18432) + 320 * 64;
  EXPECT_EQ(ActiveDecoderWeights(model.text), all);
  const int64_t pairs = 64 * 64 / 2;
  EXPECT_EQ(CountTrainingFlops(model, Job({64})).decoder, 6 * all * 64 + 3 * 2 * 4 * 4 * (12 + 8) * pairs);
}

TEST(FlopsTest, PackedDocumentsDoNotAttendToOneAnother) {
  const ModelConfig model = SmallModel();
  const absl::int128 one = CountTrainingFlops(model, Job({64})).decoder;
  const absl::int128 two = CountTrainingFlops(model, Job({32, 32})).decoder;
  EXPECT_EQ(one - two, 3 * 2 * 4 * 4 * 20 * (64 * 64 - 2 * 32 * 32) / 2);
}

TEST(FlopsTest, ALongerTextLeavesTheVisionPartUnchanged) {
  const ModelConfig model = SmallModel();
  const StepFlops before = CountTrainingFlops(model, Job({64}, 4, 4));
  const StepFlops after = CountTrainingFlops(model, Job({256}, 4, 4));
  EXPECT_EQ(before.vision, after.vision);
  EXPECT_EQ(before.projector, after.projector);
  EXPECT_GT(after.decoder, 4 * before.decoder);
}

TEST(FlopsTest, AFrozenPartCountsAThirdOrTwoThirdsByWhatIsTrainedAheadOfIt) {
  const ModelConfig model = SmallModel();
  const auto job = Job({64}, 4, 4);
  const StepFlops trained = CountTrainingFlops(model, job);
  const StepFlops tower = CountTrainingFlops(model, job, {.vision = true});
  EXPECT_EQ(tower.vision * 3, trained.vision);
  EXPECT_EQ(tower.projector, trained.projector);
  EXPECT_EQ(tower.decoder, trained.decoder);
  EXPECT_EQ(CountTrainingFlops(model, job, {.projector = true}).projector * 3, trained.projector * 2);
  EXPECT_EQ(CountTrainingFlops(model, job, {.vision = true, .projector = true}).projector * 3, trained.projector);
  EXPECT_EQ(CountTrainingFlops(model, job, {.vision = true, .decoder = true}).decoder * 3, trained.decoder * 2);
  EXPECT_EQ(CountTrainingFlops(model, job, {.vision = true, .projector = true, .decoder = true}).decoder * 3,
            trained.decoder);
}

TEST(FlopsTest, AFrozenLayerPassesGradientsOnlyWhereSomethingAheadOfItIsTrained) {
  const ModelConfig model = SmallModel();
  const auto job = Job({64});
  const auto layer = [&](int64_t i, const FrozenParts& frozen) {
    return CountTrainingFlops(model, PartRange{i, i + 1, false, false, false}, job, frozen).decoder;
  };
  const FrozenParts none;
  // Tower, projector, embedding and the first two layers stand still: these do a forward, the third both gradients.
  FrozenParts first_two{.vision = true, .projector = true, .embedding = true, .layers = {true, true, false, false}};
  EXPECT_EQ(3 * layer(0, first_two), layer(0, none));
  EXPECT_EQ(3 * layer(1, first_two), layer(1, none));
  EXPECT_EQ(layer(2, first_two), layer(2, none));
  // With a trained embedding they pass its gradient on.
  first_two.embedding = false;
  EXPECT_EQ(3 * layer(1, first_two), 2 * layer(1, none));
  // A frozen head behind trained layers passes theirs on.
  const PartRange head{4, 4, false, true, false};
  EXPECT_EQ(3 * CountTrainingFlops(model, head, job, {.head = true}).decoder, 2 * CountTrainingFlops(model, head, job).decoder);
}

TEST(FlopsTest, PartsThatMoveAreFoundFromTheTensors) {
  const ModelConfig model = SmallModel();
  const std::vector<TensorSpec> tensors = ListTensors(model);
  std::vector<bool> moves;
  for (const TensorSpec& tensor : tensors) moves.push_back(tensor.trainable && (tensor.layer == 2 || tensor.part == ModelPartKind::kProjector));
  const FrozenParts frozen = FindFrozenParts(model, tensors, moves);
  EXPECT_TRUE(frozen.vision);
  EXPECT_FALSE(frozen.projector);
  EXPECT_FALSE(frozen.decoder);
  EXPECT_TRUE(frozen.embedding);
  EXPECT_TRUE(frozen.head);
  EXPECT_EQ(frozen.layers, std::vector<bool>({true, true, false, true}));
}

TEST(FlopsTest, PartsOfAModelAddUpToItExactly) {
  const ModelConfig model = KimiVl();
  // Beyond 2^53: 64 microbatches of 32,768 tokens.
  data::v1::StepManifest step;
  for (int i = 0; i < 64; ++i) step.MergeFrom(Job({32767, 1}, 62, 34));
  const absl::int128 whole = CountTrainingFlops(model, step).total();
  EXPECT_GT(whole, absl::int128(1) << 53);
  absl::int128 sum = CountTrainingFlops(model, PartRange{0, 0, false, false, true}, step).total();
  for (const PartRange& part : {PartRange{0, 5, true, false, false}, PartRange{5, 6, false, false, false}, PartRange{6, 27, false, true, false}}) {
    sum += CountTrainingFlops(model, part, step).total();
  }
  EXPECT_EQ(sum, whole);
}

TEST(FlopsTest, MicrobatchesAddUp) {
  const ModelConfig model = SmallModel();
  auto step = Job({64}, 4, 4);
  step.MergeFrom(Job({32}));
  EXPECT_EQ(CountTrainingFlops(model, step).total(),
            CountTrainingFlops(model, Job({64}, 4, 4)).total() + CountTrainingFlops(model, Job({32})).total());
}

TEST(FlopsTest, PublishedCountsOfKimiVlAreMet) {
  const ModelConfig model = KimiVl();
  EXPECT_EQ(VisionWeights(*model.vision), 411747840);
  EXPECT_EQ(2 * ProjectorWeights(model), 61341696);
  EXPECT_EQ(CountTrainingFlops(model, Job({}, 32, 32)).vision, 3 * (int64_t{2} * 411747840 * 1024 + int64_t{124416} * 1024 * 1024));
}

}  // namespace
}  // namespace moonpipe
