// MoonViT and its projector: patches of pictures in, decoder features out.
//
//   patches -> linear + position table -> blocks (attention within each picture) -> norm -> merge 2 x 2 -> projector -> features
//
// Pictures of any sizes are packed one after the other. A clip of several frames (K2.5) is one item: its frames attend to each other and
// are averaged in the merge.
//
// Shapes: N patches, D tower width, P patch side, M feature rows, H decoder hidden.
#pragma once

#include <torch/torch.h>

#include <map>
#include <utility>
#include <vector>

#include "moonpipe/model/observer.h"
#include "moonpipe/model/parameter_store.h"
#include "moonpipe/model/projector.h"
#include "moonpipe/model/rope.h"
#include "moonpipe/model/span_attention.h"

namespace moonpipe {

// One picture (frames == 1) or clip, in patches.
struct PatchGrid {
  int64_t frames = 1;
  int64_t rows = 0;
  int64_t cols = 0;

  int64_t patches() const { return frames * rows * cols; }
  bool operator==(const PatchGrid&) const = default;
};

// Not safe for use from two threads at once.
class VisionTower {
 public:
  // Keeps handles to the store's parameters, not the store, whose part must have the vision tower.
  explicit VisionTower(const ParameterStore& store);

  // patches [N, 3, P, P], items in order, the patches of each frame in the configuration's patch_order: uint8 pixels, which are normalised here to (u / 255 - 0.5) / 0.5, or
  // fp32 already normalised. Returns features [M, H], M = sum of rows * cols / 4 over the items, in raster order of each. Throws
  // c10::Error, with both numbers, for patches that do not fill the grids and for grids that do not merge.
  torch::Tensor Forward(const torch::Tensor& patches, const std::vector<PatchGrid>& grids);

  void set_observer(TensorObserver observer) { observer_ = std::move(observer); }

 private:
  struct Block {
    torch::Tensor norm0_weight, norm0_bias, wqkv_weight, wqkv_bias, wo_weight, wo_bias;
    torch::Tensor norm1_weight, norm1_bias, fc0_weight, fc0_bias, fc1_weight, fc1_bias;

    std::vector<torch::Tensor> All() const {
      return {norm0_weight, norm0_bias, wqkv_weight, wqkv_bias, wo_weight, wo_bias, norm1_weight, norm1_bias, fc0_weight, fc0_bias, fc1_weight, fc1_bias};
    }
  };
  // What depends on the numbers of rows and columns alone.
  struct Geometry {
    torch::Tensor cubic_rows;
    torch::Tensor cubic_cols;
    RotaryTable rotary;
    torch::Tensor merge_order;     // int64 [rows * cols]: patch that stands at each place when windows are together
    torch::Tensor position_order;  // int64 [rows * cols] on the device: raster number of each patch; undefined when patches are in raster order
  };

  void CheckGrids(const torch::Tensor& patches, const std::vector<PatchGrid>& grids) const;
  const Geometry& GeometryOf(const PatchGrid& grid);
  torch::Tensor Embed(const torch::Tensor& patches, const std::vector<PatchGrid>& grids);
  torch::Tensor RunBlock(const Block& block, const torch::Tensor& x_ND, const SpanLayout& layout, const RotaryTable& rotary) const;
  torch::Tensor Merge(const torch::Tensor& x_ND, const std::vector<PatchGrid>& grids);

  VisionConfig config_;
  ComputeOptions compute_;
  torch::Device device_;
  torch::Tensor patch_weight_;
  torch::Tensor patch_bias_;
  torch::Tensor positions_;
  std::vector<Block> blocks_;
  torch::Tensor final_norm_weight_;
  torch::Tensor final_norm_bias_;
  Projector projector_;
  std::map<std::pair<int64_t, int64_t>, Geometry> geometries_;
  TensorObserver observer_;
};

}  // namespace moonpipe
