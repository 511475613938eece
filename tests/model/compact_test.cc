// The recorded batches in their compact form, one placeholder a picture, padded on either side: laid out again they give the recorded
// logits and gradients.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "moonpipe/data/batch_layout.h"
#include "moonpipe/model/label_shift.h"
#include "moonpipe/model/loss.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using testing::Fixture;
using testing::FixtureCase;
using torch::Tensor;

struct Compact {
  std::vector<int64_t> ids, mask, labels;  // [rows, columns]
  int64_t rows = 0, columns = 0;
};

// One placeholder for each picture's run, the padding on one side of every row.
Compact Compacted(const Fixture& fixture, const FixtureCase& input, const std::vector<int64_t>& feature_rows, bool left) {
  const Tensor ids = fixture.Read(input.name + "/in/input_ids"), documents = fixture.Read(input.name + "/in/attention_mask");
  const Tensor labels = fixture.Read(input.name + "/in/labels");
  const auto id = ids.accessor<int64_t, 2>(), document = documents.accessor<int64_t, 2>(), label = labels.accessor<int64_t, 2>();
  std::vector<std::array<std::vector<int64_t>, 3>> rows;
  size_t picture = 0, longest = 0;
  for (int64_t row = 0; row < ids.size(0); ++row) {
    auto& out = rows.emplace_back();
    for (int64_t i = 0; i < ids.size(1);) {
      if (document[row][i] > 0) {
        out[0].push_back(id[row][i]);
        out[1].push_back(document[row][i]);
        out[2].push_back(label[row][i]);
      }
      const bool media = id[row][i] == fixture.config().media_placeholder_token_id && document[row][i] > 0;
      i += media ? feature_rows[picture++] : 1;
    }
    longest = std::max(longest, out[0].size());
  }
  Compact compact;
  compact.rows = ids.size(0);
  compact.columns = static_cast<int64_t>(longest) + 3;  // no row is full
  for (const auto& row : rows) {
    const size_t padding = static_cast<size_t>(compact.columns) - row[0].size();
    std::vector<int64_t>* const to[] = {&compact.ids, &compact.mask, &compact.labels};
    for (size_t part = 0; part < 3; ++part) {
      if (left) to[part]->insert(to[part]->end(), padding, part == 2 ? kIgnoredLabel : 0);
      to[part]->insert(to[part]->end(), row[part].begin(), row[part].end());
      if (!left) to[part]->insert(to[part]->end(), padding, part == 2 ? kIgnoredLabel : 0);
    }
  }
  return compact;
}

class CompactTest : public ::testing::TestWithParam<std::pair<std::string, std::string>> {
 protected:
  CompactTest() { testing::PinArithmetic(); }
};

void ExpectClose(const Fixture& fixture, const std::string& kind, const std::string& name, const Tensor& got, const Tensor& want) {
  ASSERT_EQ(got.sizes(), want.sizes()) << name;
  const nlohmann::json& bound = fixture.meta()["tolerances"][kind];
  EXPECT_TRUE(torch::allclose(got, want, bound["rtol"].get<double>(), bound["atol"].get<double>()))
      << name << ": largest difference " << (got - want).abs().max().item<double>();
}

TEST_P(CompactTest, GivesTheRecordedLogitsAndGradientsPaddedOnEitherSide) {
  const Fixture fixture(GetParam().first);
  const FixtureCase input = fixture.Case(GetParam().second);
  const std::string prefix = input.name + "/";
  std::vector<int64_t> feature_rows;
  if (input.has_media) {
    for (const PatchGrid& grid : input.grids) feature_rows.push_back(grid.rows * grid.cols / 4);
  }
  for (const bool left : {false, true}) {
    const Compact compact = Compacted(fixture, input, feature_rows, left);
    if (input.has_media) {
      EXPECT_LT(compact.columns, fixture.Read(prefix + "in/input_ids").size(1)) << "the form is compact";
    }
    BatchInputs batch;
    batch.rows = compact.rows;
    batch.columns = compact.columns;
    batch.input_ids = compact.ids;
    batch.attention_mask = compact.mask;
    batch.labels = compact.labels;
    batch.feature_rows = feature_rows;
    batch.media_token = fixture.config().vision.has_value() ? fixture.config().media_placeholder_token_id : -1;
    const absl::StatusOr<BatchLayout> layout = LayOutBatch(batch);
    ASSERT_TRUE(layout.ok()) << layout.status();
    std::vector<int64_t> ids, labels, lengths;
    for (const RowLayout& row : layout->rows) {
      ids.insert(ids.end(), row.token_ids.begin(), row.token_ids.end());
      labels.insert(labels.end(), row.labels.begin(), row.labels.end());
      lengths.insert(lengths.end(), row.document_lengths.begin(), row.document_lengths.end());
    }

    ParameterStore store = fixture.Load();
    store.ZeroGradients();
    DecoderPart decoder(store);
    Tensor features_MH;
    if (input.has_media) features_MH = VisionTower(store).Forward(input.pixels, input.grids);
    DecoderInput packed{torch::tensor(ids, torch::kLong), lengths, features_MH};
    packed.last_hidden = true;
    const DecoderOutput output = decoder.Forward(packed);
    const Tensor& logits_TV = output.hidden_or_logits;
    const Tensor labels_T = ShiftLabels(torch::tensor(labels, torch::kLong), lengths, fixture.config().ignore_index);
    const Loss loss = HeadCrossEntropy(output.last_hidden_TH, store.HeadWeight(), labels_T);
    (loss.sum / (labels_T != kIgnoredLabel).sum()).backward();

    ExpectClose(fixture, "logits", "logits", logits_TV.detach(), fixture.Read(prefix + "out/logits").flatten(0, 1).index_select(0, input.valid));
    int gradients = 0;
    for (const std::string& name : fixture.NamesBelow(prefix + "grad/")) {
      ExpectClose(fixture, "grad", name, store.PublishedGradient(name), fixture.Read(prefix + "grad/" + name));
      ++gradients;
    }
    std::vector<Tensor> norms;
    for (const nlohmann::json& name : fixture.meta()["grad_norm_names"]) norms.push_back(store.PublishedGradient(name.get<std::string>()).norm());
    ExpectClose(fixture, "grad", "grad_norms", torch::stack(norms), fixture.Read(prefix + "grad_norms"));
    EXPECT_GT(gradients, 5);
  }
}

INSTANTIATE_TEST_SUITE_P(Recorded, CompactTest,
                         ::testing::Values(std::pair("kimi_vl_a3b", "two_images"), std::pair("kimi_vl_a3b", "text_only"),
                                           std::pair("kimi_vl_a3b", "packed"), std::pair("moonlight", "padded"),
                                           std::pair("moonlight", "packed"), std::pair("kimi_k2_5", "two_images"),
                                           std::pair("kimi_k2_5", "text_only"), std::pair("kimi_k2_5", "video"),
                                           std::pair("kimi_k2_5", "packed")),
                         [](const auto& instance) { return absl::StrCat(instance.param.first, "_", instance.param.second); });

}  // namespace
}  // namespace moonpipe
