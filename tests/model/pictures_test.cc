// The vision tower and projector on pictures and clips of every shape, small and at the full width of K2.5.
#include <torch/torch.h>

#include <fstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/data/chat_template.h"
#include "moonpipe/data/image_processor.h"
#include "moonpipe/data/png_decoder.h"
#include "moonpipe/data/tokenizer.h"
#include "moonpipe/data/video.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/model/media_scatter.h"
#include "moonpipe/model/position_table.h"
#include "moonpipe/model/vision_tower.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;
using Json = nlohmann::json;

constexpr PartRange kVisionOnly{0, 0, false, false, true};

ModelConfig Config(const std::string& fixture, const std::function<void(Json&)>& change = [](Json&) {}) {
  Json json = Json::parse(ReadFile(absl::StrCat(TEST_DATA_DIR, "/fixtures/", fixture, "/config.json")).value());
  change(json);
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(json.dump());
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value();
}

// The tower of K2.5 but for its depth; the decoder's fields matter by its hidden size alone.
ModelConfig FullWidth(int64_t layers) {
  return Config("kimi_k2_5", [&](Json& json) {
    json["text_config"]["hidden_size"] = 7168;
    Json& vision = json["vision_config"];
    vision["vt_hidden_size"] = vision["mm_hidden_size"] = 1152;
    vision["vt_intermediate_size"] = 4304;
    vision["vt_num_hidden_layers"] = layers;
    vision["vt_num_attention_heads"] = 16;
    vision["init_pos_emb_height"] = vision["init_pos_emb_width"] = 64;
    vision["text_hidden_size"] = 7168;
  });
}

struct Tower {
  explicit Tower(const ModelConfig& config) : store(config, kVisionOnly), tower((DrawFreshWeights(3, store), store)) {}
  ParameterStore store;
  VisionTower tower;
};

Tensor Pixels(const std::vector<uint8_t>& patches) {
  return torch::tensor(at::ArrayRef<uint8_t>(patches), torch::kByte).view({-1, 3, 14, 14});
}

Tensor RandomPatches(int64_t patches) { return torch::randint(0, 256, {patches, 3, 14, 14}, torch::kByte); }

std::string ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

class PicturesTest : public ::testing::Test {
 protected:
  PicturesTest() {
    testing::PinArithmetic();
    torch::manual_seed(11);
  }
  torch::NoGradGuard no_grad_;
};

// Photographs of different shapes, as pixels.
std::vector<RgbImage> Photographs() {
  std::ifstream file(TEST_DATA_DIR "/data/golden/photos.json");
  std::vector<RgbImage> photographs;
  for (const Json& entry : Json::parse(file)) {
    std::string png;
    EXPECT_TRUE(absl::Base64Unescape(entry["png"].get<std::string>(), &png));
    photographs.push_back(DecodePng(png).value());
  }
  return photographs;
}

// Two photographs through preprocessing, template, tower and projector of the full width.
void RunTwoPhotographs(int64_t layers) {
  const ModelConfig config = FullWidth(layers);
  PictureRule rule;
  rule.size_rule = SizeRule::kPatchLimits;
  rule.max_patches = 16384;
  const std::vector<RgbImage> photographs = Photographs();
  std::vector<PatchGrid> grids;
  std::vector<uint32_t> positions;
  std::vector<uint8_t> patches;
  Record record{{{"user", {{true, "", 0}, {false, "and", 0}, {true, "", 1}}}, {"assistant", {{false, "a cat", 0}}}}, {"a", "b"}};
  for (const RgbImage& photograph : {photographs[0], photographs[1]}) {
    const PicturePatches picture = ProcessImage(photograph, rule).value();
    grids.push_back({1, picture.rows, picture.columns});
    positions.push_back(MediaPositions(picture.rows, picture.columns, rule.merge));
    patches.insert(patches.end(), picture.patches.begin(), picture.patches.end());
  }
  ASSERT_NE(grids[0], grids[1]);
  const auto tokenizer = Tokenizer::Load(SOURCE_DIR "/examples/digits/tokenizer").value();
  const ChatTemplate chat_template = ChatTemplate::Make("kimi-vl", tokenizer.get()).value();
  const TokenSequence sequence = chat_template.Render(record, positions).value();
  const Tensor ids = torch::tensor(at::ArrayRef<int32_t>(sequence.ids)).to(torch::kLong);
  const Tensor media = moonpipe::MediaPositions(ids, chat_template.media_pad());

  Tower full(config);
  const Tensor features = full.tower.Forward(Pixels(patches), grids);
  EXPECT_EQ(features.sizes(), (std::vector<int64_t>{media.size(0), 7168}));
  EXPECT_EQ(features.size(0), 15 + 16) << "120 x 80 pixels are 6 x 10 patches, 90 x 110 are 8 x 8";
  EXPECT_TRUE(features.isfinite().all().item<bool>());
  EXPECT_GT(features.std().item<double>(), 0.0);
  // Packed pictures do not see each other.
  const int64_t first = grids[0].patches();
  const Tensor alone = full.tower.Forward(Pixels(patches).slice(0, first), {grids[1]});
  EXPECT_LT((features.slice(0, positions[0]) - alone).abs().max().item<double>(), 1e-4 * alone.abs().max().item<double>());
  // ScatterMedia checks the count.
  EXPECT_EQ(ScatterMedia(torch::zeros({ids.size(0), 7168}), media, features).index_select(0, media).sum().item<float>(),
            features.sum().item<float>());
}

TEST_F(PicturesTest, TwoPhotographsFillTheTemplatesPositionsAtFullWidth) { RunTwoPhotographs(2); }

class FullTowerLongTest : public PicturesTest {};

TEST_F(FullTowerLongTest, TwoPhotographsGoThroughTheWholeTowerOfK25) { RunTwoPhotographs(27); }

TEST_F(PicturesTest, AClipHasAsManyFeaturesAsOneFrame) {
  Tower clips(Config("kimi_k2_5"));
  for (int64_t frames = 1; frames <= 4; ++frames) {
    EXPECT_EQ(clips.tower.Forward(RandomPatches(frames * 24), {{frames, 4, 6}}).size(0), 6) << frames;
  }
  EXPECT_THAT(ErrorOf([&] { clips.tower.Forward(RandomPatches(5 * 24), {{5, 4, 6}}); }), HasSubstr("has 5 frames, this tower takes 4"));
}

TEST_F(PicturesTest, TheTwoDimensionalTowerRefusesClipsWithBothNumbers) {
  Tower flat(Config("kimi_vl_a3b"));
  EXPECT_EQ(flat.tower.Forward(RandomPatches(24), {{1, 4, 6}}).size(0), 6);
  EXPECT_THAT(ErrorOf([&] { flat.tower.Forward(RandomPatches(2 * 24), {{2, 4, 6}}); }), HasSubstr("has 2 frames, this tower takes 1"));
}

// Attention spans all frames and the merge averages them, so equal frames differ from one picture by the temporal term alone; with that
// term constant over the frames, it would be one picture.
TEST_F(PicturesTest, FramesOfAClipAreToldApartByTheirTime) {
  Tower clips(Config("kimi_k2_5"));
  const Tensor frame = RandomPatches(16), other = RandomPatches(16);
  const Tensor forward = clips.tower.Forward(torch::cat({frame, other}), {{2, 4, 4}});
  const Tensor backward = clips.tower.Forward(torch::cat({other, frame}), {{2, 4, 4}});
  EXPECT_GT((forward - backward).abs().max().item<double>(), 1e-3);
  const Tensor mixed = clips.tower.Forward(torch::cat({frame, frame, other}), {{1, 4, 4}, {2, 4, 4}});
  const Tensor pair = clips.tower.Forward(torch::cat({frame, other}), {{2, 4, 4}});
  EXPECT_LT((mixed.slice(0, 4) - pair).abs().max().item<double>(), 1e-4) << "a picture and a clip in one batch";
}

TEST_F(PicturesTest, TheTemporalTermIsSinesThenCosines) {
  const Tensor term = FramePositions(4, 8);
  EXPECT_TRUE(torch::equal(term[0], torch::tensor({0, 0, 0, 0, 1, 1, 1, 1}).to(torch::kFloat)));
  for (int p = 0; p < 4; ++p) {
    for (int i = 0; i < 4; ++i) {
      const double angle = p * std::pow(10000.0, -i / 4.0);
      EXPECT_NEAR(term[p][i].item<double>(), std::sin(angle), 1e-6);
      EXPECT_NEAR(term[p][4 + i].item<double>(), std::cos(angle), 1e-6);
    }
  }
}

// Above, below and across the size of the table in either direction, against LibTorch's own kernel.
TEST_F(PicturesTest, ThePositionTableFitsGridsOfAnyShape) {
  const Tensor table = torch::randn({8, 6, 5});
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{8, 6}, {8, 12}, {16, 6}, {4, 6}, {2, 20}, {30, 2}, {2, 2}, {7, 5}, {64, 64}}) {
    const Tensor ours = InterpolatePositions(table, CubicWeights(rows, 8), CubicWeights(cols, 6)).view({rows, cols, 5});
    const Tensor theirs = at::upsample_bicubic2d(table.permute({2, 0, 1}).unsqueeze(0), {rows, cols}, false).squeeze(0).permute({1, 2, 0});
    EXPECT_LT((ours - theirs).abs().max().item<double>(), 2e-5) << rows << " x " << cols;
  }
}

TEST_F(PicturesTest, BlocksGiveTheFeaturesOfRasters) {
  for (const std::string fixture : {"kimi_vl_a3b", "kimi_k2_5"}) {
    Tower raster(Config(fixture));
    Tower block(Config(fixture, [](Json& json) { json["vision_config"]["patch_order"] = "block"; }));
    const std::vector<PatchGrid> grids = {{1, 4, 8}, {fixture == "kimi_k2_5" ? 3 : 1, 6, 4}};
    std::vector<int64_t> order;
    for (const PatchGrid& grid : grids) {
      for (int64_t frame = 0; frame < grid.frames; ++frame) {
        const auto first = static_cast<int64_t>(order.size());
        for (const int64_t place : PatchSequence(PatchOrder::kBlock, grid.rows, grid.cols, 2, 2)) order.push_back(first + place);
      }
    }
    const Tensor patches = RandomPatches(static_cast<int64_t>(order.size()));
    const Tensor expected = raster.tower.Forward(patches, grids);
    const Tensor got = block.tower.Forward(patches.index_select(0, torch::tensor(order)), grids);
    EXPECT_LT((got - expected).abs().max().item<double>(), 1e-4 * expected.abs().max().item<double>()) << fixture;
    EXPECT_GT((block.tower.Forward(patches, grids) - expected).abs().max().item<double>(), 1e-2) << "the order matters";
  }
}

// R06's last line, turned: a wide and a tall picture are each other's mirror where everything that tells rows from columns is.
TEST_F(PicturesTest, WideAndTallPicturesTakeTheirOwnPositions) {
  Tower flat(Config("kimi_vl_a3b"));
  const Tensor patches = RandomPatches(12);
  const Tensor wide = flat.tower.Forward(patches, {{1, 2, 6}}), tall = flat.tower.Forward(patches, {{1, 6, 2}});
  EXPECT_EQ(wide.sizes(), tall.sizes());
  EXPECT_GT((wide - tall).abs().max().item<double>(), 1e-3);
}

}  // namespace
}  // namespace moonpipe
