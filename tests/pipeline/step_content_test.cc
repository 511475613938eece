// What a step makes of its microbatches: whose labels, whose pictures, whose rows.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/pipeline/step_workers.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Not;

TEST(StepContentTest, TheStepsLossIsTheMeanOverAllItsLabelsHoweverTheyAreDivided) {
  // The same documents in one microbatch and in four: equal sums, gradients equal up to the order of addition.
  Step joined;
  joined.manifest.set_step(5);
  auto* all = joined.manifest.add_microbatches();
  Microbatch& bytes = joined.microbatches.emplace_back();
  for (int i = 0; i < 4; ++i) {
    const auto& one = DigitsStep().manifest.microbatches(i);
    all->set_tokens(all->tokens() + one.tokens());
    all->set_trained_labels(all->trained_labels() + one.trained_labels());
    all->set_feature_rows(all->feature_rows() + one.feature_rows());
    all->mutable_document_lengths()->MergeFrom(one.document_lengths());
    all->mutable_grids()->MergeFrom(one.grids());
    const Microbatch& from = DigitsStep().microbatches[static_cast<size_t>(i)];
    bytes.token_ids.insert(bytes.token_ids.end(), from.token_ids.begin(), from.token_ids.end());
    bytes.labels.insert(bytes.labels.end(), from.labels.begin(), from.labels.end());
    bytes.patches.insert(bytes.patches.end(), from.patches.begin(), from.patches.end());
  }
  Workers one({.stages = 1}, joined), four({.stages = 1});
  ASSERT_TRUE(one.Run().ok());
  ASSERT_TRUE(four.Run().ok());
  double sum = 0;
  for (const double loss : four.Losses()) sum += loss;
  EXPECT_NEAR(one.Losses().front(), sum, 1e-5 * sum);
  double worst = 0;
  for (const TensorSpec& spec : one.store(0).specs()) {
    if (!spec.trainable) continue;
    const torch::Tensor a = one.store(0).PublishedGradient(spec.name), b = four.store(0).PublishedGradient(spec.name);
    worst = std::max(worst, static_cast<double>((a - b).norm().item<float>() / (1e-6F + a.norm().item<float>())));
  }
  // Sums of a few hundred fp32 terms in another order.
  EXPECT_LT(worst, 1e-4);
}

TEST(StepContentTest, LargestLogitsAndTheBalanceLossAreThoseOfTheWholeStep) {
  const DecoderStage::Options recorded = {.balance_loss_weight = 0.5, .qk_clip_threshold = 100};
  struct Numbers {
    std::map<uint32_t, std::vector<float>> largest;  // of each layer's heads
    double balance = 0;
  };
  const auto run = [&](int32_t stages, const Step& step) {
    Workers workers({.stages = stages, .decoder = recorded}, step);
    EXPECT_TRUE(workers.Run().ok());
    Numbers numbers;
    for (size_t worker = 0; worker < workers.size(); ++worker) {
      numbers.balance += workers.report(worker).balance_loss();
      for (const auto& layer : workers.report(worker).largest_logits()) {
        numbers.largest[layer.layer()] = {layer.logits().begin(), layer.logits().end()};
      }
    }
    return numbers;
  };
  // Each microbatch as a step of its own: the maximum over them, and the mean over their documents.
  Numbers wanted;
  int documents = 0;
  bool last_is_largest = true;
  for (int i = 0; i < 4; ++i) {
    Step alone;
    alone.manifest.set_step(5);
    *alone.manifest.add_microbatches() = DigitsStep().manifest.microbatches(i);
    alone.manifest.mutable_microbatches(0)->set_index(0);
    alone.microbatches.push_back(DigitsStep().microbatches[static_cast<size_t>(i)]);
    const Numbers part = run(1, alone);
    const int own = alone.manifest.microbatches(0).document_lengths_size();
    documents += own;
    wanted.balance += own * part.balance;
    for (const auto& [layer, heads] : part.largest) {
      std::vector<float>& most = wanted.largest.try_emplace(layer, heads).first->second;
      for (size_t head = 0; head < heads.size(); ++head) {
        if (i == 3) last_is_largest = last_is_largest && heads[head] >= most[head];
        most[head] = std::max(most[head], heads[head]);
      }
    }
  }
  wanted.balance /= documents;
  ASSERT_GT(documents, 1);
  ASSERT_FALSE(last_is_largest) << "the last microbatch alone would do";
  ASSERT_EQ(wanted.largest.size(), 4U);
  for (const int32_t stages : {1, 2}) {
    const Numbers step = run(stages, DigitsStep());
    EXPECT_NEAR(step.balance, wanted.balance, 1e-5 * wanted.balance) << stages;
    EXPECT_EQ(step.largest, wanted.largest) << stages;
  }
}

// One microbatch of a text, with a picture of one colour (its channel's values are 255) and 2 x `columns` patches before it if columns > 0.
void AddColouredMicrobatch(uint32_t columns, size_t channel, Step& step) {
  auto* manifest = step.manifest.add_microbatches();
  Microbatch& microbatch = step.microbatches.emplace_back();
  const uint32_t rows = columns / 2;
  microbatch.token_ids.assign(rows, 421);
  for (const int32_t id : {7, 300, 12, 45, 90}) microbatch.token_ids.push_back(id);
  microbatch.labels.assign(microbatch.token_ids.size(), -100);
  for (size_t i = rows + 1; i < microbatch.labels.size(); ++i) microbatch.labels[i] = microbatch.token_ids[i];
  if (columns > 0) {
    auto* grid = manifest->add_grids();
    grid->set_frames(1);
    grid->set_rows(2);
    grid->set_columns(columns);
    microbatch.patches.assign(size_t{2} * columns * 588, 0);
    for (size_t i = 0; i < microbatch.patches.size(); ++i) {
      if (i / 196 % 3 == channel) microbatch.patches[i] = 255;
    }
  }
  manifest->set_index(static_cast<uint32_t>(step.microbatches.size() - 1));
  manifest->set_tokens(static_cast<uint32_t>(microbatch.token_ids.size()));
  manifest->add_document_lengths(manifest->tokens());
  manifest->set_feature_rows(rows);
  manifest->set_trained_labels(4);
}

// Columns of patches of the four microbatches; the narrow picture has the channel `narrow`, the wide one `wide`.
Step ColouredStep(const std::vector<uint32_t>& columns, size_t narrow, size_t wide) {
  Step step;
  step.manifest.set_step(5);
  for (const uint32_t count : columns) AddColouredMicrobatch(count, count == 2 ? narrow : wide, step);
  return step;
}

TEST(StepContentTest, PicturesStayWithTheirMicrobatch) {
  constexpr size_t kRed = 0, kBlue = 2;
  for (const std::vector<uint32_t>& columns : {std::vector<uint32_t>{0, 2, 0, 4}, std::vector<uint32_t>{2, 0, 0, 4}}) {
    const Step step = ColouredStep(columns, kRed, kBlue);
    const Step exchanged_step = ColouredStep(columns, kBlue, kRed);
    Workers together({.stages = 2, .vision_in_first_stage = false}, step);
    Workers exchanged({.stages = 2, .vision_in_first_stage = false}, exchanged_step);
    ASSERT_TRUE(together.Run().ok());
    ASSERT_TRUE(exchanged.Run().ok());
    std::map<std::string, torch::Tensor> sums;
    for (size_t i = 0; i < columns.size(); ++i) {
      Step single;
      single.manifest.set_step(5);
      AddColouredMicrobatch(columns[i], columns[i] == 2 ? kRed : kBlue, single);
      Workers alone({.stages = 1}, single);
      ASSERT_TRUE(alone.Run().ok());
      EXPECT_NEAR(alone.Losses().front(), together.Losses()[i], 1e-5 * together.Losses()[i]) << i;
      if (columns[i] > 0) {
        EXPECT_GT(std::abs(exchanged.Losses()[i] - together.Losses()[i]), 1e-6) << i;
      } else {
        EXPECT_EQ(exchanged.Losses()[i], together.Losses()[i]) << i;
      }
      for (const TensorSpec& spec : alone.store(0).specs()) {
        if (!spec.trainable) continue;
        const torch::Tensor gradient = alone.store(0).PublishedGradient(spec.name);
        if (!gradient.defined()) continue;
        torch::Tensor& sum = sums[spec.name];
        sum = sum.defined() ? sum + gradient / 4 : gradient / 4;  // four equal shares of the step's labels
      }
    }
    size_t compared = 0;
    for (size_t worker = 0; worker < together.size(); ++worker) {
      for (const TensorSpec& spec : together.store(worker).specs()) {
        if (!spec.trainable) continue;
        const torch::Tensor gradient = together.store(worker).PublishedGradient(spec.name);
        ASSERT_TRUE(sums.contains(spec.name)) << spec.name;
        EXPECT_LT((gradient - sums[spec.name]).norm().item<float>(), 1e-5F * (1e-3F + gradient.norm().item<float>())) << spec.name;
        ++compared;
      }
    }
    EXPECT_GE(compared, sums.size());
  }
}

// The digits with the pictures of a microbatch masked: their placeholders leave the sequence.
Step MaskPictures(Step step, uint32_t index) {
  auto& manifest = *step.manifest.mutable_microbatches(static_cast<int>(index));
  Microbatch& microbatch = step.microbatches[index];
  Microbatch kept = microbatch;
  kept.token_ids.clear();
  kept.labels.clear();
  size_t begin = 0;
  std::vector<uint32_t> lengths;
  for (const uint32_t length : manifest.document_lengths()) {
    uint32_t left = 0;
    for (size_t i = begin; i < begin + length; ++i) {
      if (microbatch.token_ids[i] == 421) continue;
      kept.token_ids.push_back(microbatch.token_ids[i]);
      kept.labels.push_back(microbatch.labels[i]);
      ++left;
    }
    lengths.push_back(left);
    begin += length;
  }
  microbatch = kept;
  manifest.mutable_document_lengths()->Assign(lengths.begin(), lengths.end());
  manifest.set_tokens(static_cast<uint32_t>(kept.token_ids.size()));
  auto* span = manifest.add_masked_features();
  span->set_begin(0);
  span->set_end(manifest.feature_rows());
  return step;
}

TEST(StepContentTest, AMaskedPictureIsEncodedAndLeavesVisionGradientsOfExactlyZero) {
  Step step = DigitsStep();
  for (const uint32_t index : {0U, 1U, 3U}) step = MaskPictures(step, index);
  // The same text without any picture at all.
  Step text = step;
  for (auto& manifest : *text.manifest.mutable_microbatches()) {
    manifest.clear_grids();
    manifest.clear_feature_rows();
    manifest.clear_masked_features();
  }
  for (const int stages : {1, 2}) {
    Workers masked({.stages = stages, .vision_in_first_stage = false}, step), without({.stages = stages, .vision_in_first_stage = false}, text);
    ASSERT_TRUE(masked.Run().ok());
    ASSERT_TRUE(without.Run().ok());
    EXPECT_EQ(masked.Losses(), without.Losses());
    // It went through the tower: the features were sent.
    EXPECT_GT(masked.report(0).edges(0).payload_bytes(), 0U);
    EXPECT_EQ(without.report(0).edges(0).payload_bytes(), 0U);
    const auto a = masked.Gradients(), b = without.Gradients();
    for (const auto& [name, bytes] : b) {
      if (name.find("language_model") == 0) {
        EXPECT_EQ(a.at(name), bytes) << name;
      }
    }
    // Exactly zero, whatever its sign.
    int vision = 0;
    for (const TensorSpec& spec : masked.store(0).specs()) {
      if (!spec.trainable) continue;
      EXPECT_EQ(masked.store(0).PublishedGradient(spec.name).abs().max().item<float>(), 0) << spec.name;
      ++vision;
    }
    EXPECT_GT(vision, 20);
    const auto& counts = masked.report(masked.size() - 1).expert_counts();
    ASSERT_GT(counts.size(), 0);
    uint64_t routed = 0, tokens = 0;
    for (const uint64_t count : counts.rbegin()->counts()) routed += count;
    for (const auto& manifest : step.manifest.microbatches()) tokens += manifest.tokens();
    EXPECT_EQ(routed % tokens, 0U) << "every token that is left goes to the same number of experts, and no other token does";
    EXPECT_EQ(routed, tokens * static_cast<uint64_t>(Config().text.num_experts_per_tok));
  }
}

TEST(StepContentTest, AStepMayStartFromEmbeddings) {
  // The text's own embeddings, handed in, give the text's losses.
  Step text = DigitsStep();
  for (const uint32_t index : {0U, 1U, 3U}) text = MaskPictures(text, index);
  for (auto& manifest : *text.manifest.mutable_microbatches()) {
    manifest.clear_grids();
    manifest.clear_feature_rows();
    manifest.clear_masked_features();
  }
  Workers tokens({.stages = 2}, text);
  ASSERT_TRUE(tokens.Run().ok());
  Step embeddings = text;
  const torch::Tensor table = tokens.store(0).PublishedValue(tokens.store(0).decoder_prefix() + "embed_tokens.weight").detach().contiguous();
  const int64_t hidden = table.size(1);
  for (size_t i = 0; i < embeddings.microbatches.size(); ++i) {
    Microbatch& microbatch = embeddings.microbatches[i];
    for (const int32_t id : microbatch.token_ids) {
      const float* row = table.const_data_ptr<float>() + id * hidden;
      microbatch.embeddings.insert(microbatch.embeddings.end(), row, row + hidden);
    }
    microbatch.token_ids.clear();
    embeddings.manifest.mutable_microbatches(static_cast<int>(i))->set_has_embeddings(true);
  }
  Workers started({.stages = 2}, embeddings);
  ASSERT_TRUE(started.Run().ok());
  EXPECT_EQ(started.Losses(), tokens.Losses());
  EXPECT_EQ(started.store(0).PublishedGradient(tokens.store(0).decoder_prefix() + "embed_tokens.weight").abs().max().item<float>(), 0);
}

TEST(StepContentTest, LabelsThatAreNotThoseOfTheManifestAreRefusedWithBothNumbers) {
  Step step = DigitsStep();
  // One label less than announced.
  std::vector<int32_t>& labels = step.microbatches[1].labels;
  *std::find_if(labels.begin(), labels.end(), [](int32_t label) { return label != -100; }) = -100;
  const uint32_t announced = step.manifest.microbatches(1).trained_labels();
  Workers workers({.stages = 1}, step);
  EXPECT_THAT(std::string(workers.Run().message()), AllOf(HasSubstr(absl::StrCat("trains ", announced - 1, " labels")), HasSubstr(absl::StrCat("announces ", announced))));
}

}  // namespace
}  // namespace moonpipe
