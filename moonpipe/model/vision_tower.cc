#include "moonpipe/model/vision_tower.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "moonpipe/model/activations.h"
#include "moonpipe/model/linear.h"
#include "moonpipe/model/norms.h"
#include "moonpipe/model/position_table.h"
#include "moonpipe/model/recompute.h"
#include "moonpipe/model/rows.h"
#include "moonpipe/model/test_faults.h"

namespace moonpipe {
namespace {

using torch::Tensor;

constexpr double kNormEps = 1e-5;
// Grids of a data set are few; this bounds the cache for one that has very many.
constexpr size_t kMaxGeometries = 1024;

bool AllEqual(const std::vector<PatchGrid>& grids) {
  return std::all_of(grids.begin(), grids.end(), [&](const PatchGrid& grid) { return grid == grids.front(); });
}

}  // namespace

VisionTower::VisionTower(const ParameterStore& store)
    : config_(store.config().vision.value()), compute_(store.compute()), device_(store.parameters().front().value.device()), projector_(store) {
  const std::string tower = "vision_tower.";
  patch_weight_ = store.Get(tower + "patch_embed.proj.weight");
  patch_bias_ = store.Get(tower + "patch_embed.proj.bias");
  positions_ = store.Get(tower + "patch_embed.pos_emb.weight");
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    const auto get = [&](const char* name) { return store.Get(absl::StrCat(tower, "encoder.blocks.", i, ".", name)); };
    blocks_.push_back({get("norm0.weight"), get("norm0.bias"), get("wqkv.weight"), get("wqkv.bias"), get("wo.weight"), get("wo.bias"),
                       get("norm1.weight"), get("norm1.bias"), get("mlp.fc0.weight"), get("mlp.fc0.bias"), get("mlp.fc1.weight"),
                       get("mlp.fc1.bias")});
  }
  final_norm_weight_ = store.Get(tower + "encoder.final_layernorm.weight");
  final_norm_bias_ = store.Get(tower + "encoder.final_layernorm.bias");
}

void VisionTower::CheckGrids(const Tensor& patches, const std::vector<PatchGrid>& grids) const {
  int64_t expected = 0;
  for (size_t i = 0; i < grids.size(); ++i) {
    const PatchGrid& grid = grids[i];
    TORCH_CHECK(grid.frames > 0 && grid.rows > 0 && grid.cols > 0 && grid.rows % config_.merge_height == 0 &&
                    grid.cols % config_.merge_width == 0,
                "picture ", i, " has ", grid.frames, " x ", grid.rows, " x ", grid.cols, " patches; rows and columns must be multiples of ",
                config_.merge_height, " and ", config_.merge_width);
    TORCH_CHECK(grid.frames <= config_.init_pos_emb_time, "picture ", i, " has ", grid.frames, " frames, this tower takes ",
                config_.init_pos_emb_time);
    expected += grid.patches();
  }
  TORCH_CHECK(!grids.empty(), "the vision tower was called without a picture; a microbatch without pictures needs no tower");
  TORCH_CHECK(patches.dim() == 4 && patches.size(0) == expected && patches.size(1) == 3 && patches.size(2) == config_.patch_size &&
                  patches.size(3) == config_.patch_size,
              "the grids have ", expected, " patches of [3, ", config_.patch_size, ", ", config_.patch_size, "], but the patches are ",
              patches.sizes());
}

const VisionTower::Geometry& VisionTower::GeometryOf(const PatchGrid& grid) {
  const auto found = geometries_.find({grid.rows, grid.cols});
  if (found != geometries_.end()) return found->second;
  RotaryTable rotary = MakeRotaryTable(PatchAngles(grid.rows, grid.cols, config_.head_dim()));
  const Tensor blocks = torch::tensor(PatchSequence(PatchOrder::kBlock, grid.rows, grid.cols, config_.merge_height, config_.merge_width));
  Geometry geometry{CubicWeights(grid.rows, config_.init_pos_emb_height).to(device_),
                    CubicWeights(grid.cols, config_.init_pos_emb_width).to(device_),
                    {},
                    blocks,
                    {}};
  if (config_.patch_order == PatchOrder::kBlock) {
    // Patches come with their windows together: positions and angles follow them, and nothing is left to merge.
    rotary = {rotary.cos_T1d.index_select(0, blocks), rotary.sin_T1d.index_select(0, blocks)};
    geometry.merge_order = torch::arange(grid.rows * grid.cols);
    geometry.position_order = blocks.to(device_);
  }
  geometry.rotary = {rotary.cos_T1d.to(device_), rotary.sin_T1d.to(device_)};
  return geometries_.emplace(std::pair(grid.rows, grid.cols), std::move(geometry)).first->second;
}

Tensor VisionTower::Embed(const Tensor& patches, const std::vector<PatchGrid>& grids) {
  Tensor pixels = patches.to(device_);
  if (pixels.scalar_type() == torch::kByte) pixels = pixels.to(torch::kFloat).div_(255).sub_(0.5).div_(0.5);
  const Tensor x_ND = Linear(pixels.flatten(1).to(compute_.dtype), patch_weight_.flatten(1), patch_bias_);

  const auto positions_of = [&](const PatchGrid& grid) {
    const Geometry& geometry = GeometryOf(grid);
    Tensor frame = InterpolatePositions(positions_, geometry.cubic_rows, geometry.cubic_cols);
    if (geometry.position_order.defined()) frame = frame.index_select(0, geometry.position_order);
    if (grid.frames == 1) return frame.to(compute_.dtype);
    const Tensor times = FramePositions(grid.frames, config_.hidden_size).to(frame.options());
    return (times.unsqueeze(1) + frame.unsqueeze(0)).flatten(0, 1).to(compute_.dtype);
  };
  if (AllEqual(grids)) return (x_ND.unflatten(0, {static_cast<int64_t>(grids.size()), -1}) + positions_of(grids.front())).flatten(0, 1);
  // A grid that occurs many times is interpolated once.
  std::vector<std::pair<PatchGrid, Tensor>> known;
  std::vector<Tensor> parts;
  for (const PatchGrid& grid : grids) {
    auto found = std::find_if(known.begin(), known.end(), [&](const auto& entry) { return entry.first == grid; });
    if (found == known.end()) found = known.insert(known.end(), {grid, positions_of(grid)});
    parts.push_back(found->second);
  }
  return x_ND + torch::cat(parts);
}

Tensor VisionTower::RunBlock(const Block& block, const Tensor& x_ND, const SpanLayout& layout, const RotaryTable& rotary) const {
  const int64_t heads = config_.num_attention_heads;
  const Tensor qkv = Linear(LayerNorm(x_ND, block.norm0_weight, block.norm0_bias, kNormEps), block.wqkv_weight, block.wqkv_bias);
  // Rows of wqkv are all of q, then k, then v: the first two thirds of the heads rotate.
  const std::vector<Tensor> parts =
      RotatePart(qkv.unflatten(1, {3 * heads, config_.head_dim()}), rotary, 2 * heads, 0).split_with_sizes({heads, heads, heads}, 1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(config_.head_dim()));
  const Tensor attended = SpanAttention(parts[0], parts[1], parts[2], layout, /*causal=*/false, scale, compute_.explicit_attention).flatten(1);
  const Tensor middle_ND = x_ND + Linear(attended, block.wo_weight, block.wo_bias);
  const Tensor inner = Linear(LayerNorm(middle_ND, block.norm1_weight, block.norm1_bias, kNormEps), block.fc0_weight, block.fc0_bias);
  return middle_ND + Linear(HasTestFault(TestFault::kErfGelu) ? at::gelu(inner, "none") : GeluTanh(inner), block.fc1_weight, block.fc1_bias);
}

// [N, D] -> [M, merged, D]: the patches of each window together, windows in raster order, frames averaged.
Tensor VisionTower::Merge(const Tensor& x_ND, const std::vector<PatchGrid>& grids) {
  std::vector<Tensor> orders;
  std::vector<int64_t> sizes;
  int64_t first = 0;
  bool clips = false;
  for (const PatchGrid& grid : grids) {
    const Tensor& order = GeometryOf(grid).merge_order;
    for (int64_t frame = 0; frame < grid.frames; ++frame, first += grid.rows * grid.cols) orders.push_back(order + first);
    sizes.push_back(grid.patches());
    clips = clips || grid.frames > 1;
  }
  const Tensor order = torch::cat(orders);
  const Tensor inverse = torch::empty_like(order).scatter_(0, order, torch::arange(order.size(0)));
  const Tensor together = PermuteRows(x_ND, order.to(device_), inverse.to(device_));
  const int64_t window = config_.merge_height * config_.merge_width;
  if (!clips) return together.unflatten(0, {-1, window});
  std::vector<Tensor> items = together.split_with_sizes(sizes);
  for (size_t i = 0; i < items.size(); ++i) items[i] = items[i].unflatten(0, {grids[i].frames, -1, window}).mean(0);
  return torch::cat(items);
}

Tensor VisionTower::Forward(const Tensor& patches, const std::vector<PatchGrid>& grids) {
  CheckGrids(patches, grids);
  if (geometries_.size() > kMaxGeometries) geometries_.clear();
  std::vector<int64_t> lengths;
  std::vector<Tensor> cosines;
  std::vector<Tensor> sines;
  for (const PatchGrid& grid : grids) {
    lengths.push_back(grid.patches());
    const RotaryTable& rotary = GeometryOf(grid).rotary;
    for (int64_t frame = 0; frame < grid.frames; ++frame) {
      cosines.push_back(rotary.cos_T1d);
      sines.push_back(rotary.sin_T1d);
    }
  }
  const RotaryTable rotary{torch::cat(cosines), torch::cat(sines)};
  const SpanLayout layout(std::move(lengths), device_);

  Tensor x_ND = Embed(patches, grids);
  if (observer_) observer_("vision.patch_embed", x_ND);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    x_ND = compute_.recompute != Recompute::kLayers ? RunBlock(blocks_[i], x_ND, layout, rotary)
                                                    : Recomputed(x_ND, AnyTrained(blocks_[i].All()), [this, i, layout, rotary](const Tensor& x, bool /*again*/) {
                                                        return RunBlock(blocks_[i], x, layout, rotary);
                                                      });
    if (observer_) observer_(absl::StrCat("vision.layers.", i), x_ND);
  }
  x_ND = LayerNorm(x_ND, final_norm_weight_, final_norm_bias_, kNormEps);
  const Tensor merged_MmD = Merge(x_ND, grids);
  const Tensor features_MH = projector_.Forward(merged_MmD);
  if (observer_) {
    observer_("vision.final_layernorm", x_ND);
    observer_("vision.merged", merged_MmD);
    observer_("projected", features_MH);
  }
  return features_MH;
}

}  // namespace moonpipe
