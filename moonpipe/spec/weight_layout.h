// How a folder spells a model's weights, and how that maps to the canonical tensors of ListTensors. No LibTorch, no bytes: names,
// shapes and row ranges, found from the folder's headers alone.
//
// One list serves both ways: a load copies rows of stored tensors into canonical ones, a save copies them back. Every tensor is seen as
// a matrix, first dimension by the rest; a stack of experts [E, R, C] is a matrix [E * R, C]. What a folder may differ in, in any
// combination:
//
//   projector      multi_modal_projector.{pre_norm,linear_1,linear_2} or mm_projector.{pre_norm,proj.0,proj.2} or {..,in_proj,out_proj}
//   tower's QKV    one matrix wqkv, or three under wq/wk/wv, q_proj/k_proj/v_proj, attn.q_proj/..
//   patches        Conv2d [D, 3, P, P] or linear [D, 3 * P * P]
//   experts        one by one, or stacked over a layer: gate_up_proj [E, 2F, H] + down_proj [E, H, F]; gate_proj, up_proj, down_proj; or
//                  w1, w3, w2 (gate, up, down). With or without `.weight`.
//   native         names of transformers 5: model.language_model., model.vision_tower.layers., top-level lm_head, norm0/norm1 called
//                  norm1/norm2, fc0/fc1 called fc1/fc2; q and k of the tower with each head's rows permuted from adjacent rotary pairs to
//                  halves
//   head           also there although tied: then it must equal the embedding
//   encoding       plain F32, BF16, F16; INT4 (`_packed`, `_scale`, `_shape`) and FP8 blocks (`_scale_inv`), tensor by tensor
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/safetensors.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

enum class WeightEncoding { kPlain, kInt4, kFp8 };

// Rows of a canonical tensor and where they lie in the stored one. A piece covers whole rotary heads where rows are permuted.
struct WeightPiece {
  std::string tensor;  // TensorSpec::name
  int64_t rows = 0;
  int64_t tensor_row = 0;
  int64_t stored_row = 0;
};

// One stored tensor.
struct StoredWeight {
  std::string name;            // of the plain tensor; an encoded one appends _packed and so on
  std::vector<int64_t> shape;  // decoded
  StoredType type = StoredType::kF32;
  WeightEncoding encoding = WeightEncoding::kPlain;
  // Width of a rotary head whose rows are stored first halves of all pairs, then second halves; 0: rows as they are.
  int64_t half_split_head = 0;
  bool is_tied_head = false;  // a second copy of the tied embedding
  std::vector<WeightPiece> pieces;

  int64_t rows() const { return shape.front(); }
  int64_t columns() const;  // elements of a row, where stacks count as rows of their matrices
  int64_t matrix_rows() const;
};

// Row of the stored tensor that holds row `row` of the piece, counted from the piece's beginning.
int64_t StoredRowOf(const StoredWeight& weight, int64_t row);

using WeightLayout = std::vector<StoredWeight>;

// The published layout in F32: one stored tensor a canonical one.
WeightLayout PublishedLayout(const std::vector<TensorSpec>& tensors);

// Finds out how the folder spells the model and checks all of its names, shapes and dtypes. INVALID_ARGUMENT lists every missing, unknown
// and misfit tensor at once (the first thousand of each kind), misfits with both shapes. Rotary tables (`rotary_emb.inv_freq`) are
// passed over. In canonical order.
absl::StatusOr<WeightLayout> DetectLayout(const ModelConfig& config, const ModelFolder& folder);

}  // namespace moonpipe
