// Which tensors Muon moves, and which matrices stand in each. No LibTorch.
#pragma once

#include <cstdint>
#include <vector>

#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/tensor_list.h"

namespace moonpipe {

// True for weights that are matrices inside the network. Embeddings (of tokens, patches and positions), the head, norms, biases and the
// router keep AdamW.
bool TakesMuon(const TensorSpec& tensor);

// One matrix within a published tensor [rows, columns]: with the rows cut into `blocks` equal blocks, rows first .. first + rows of each.
//   wqkv [3 D, D] holds {1, 0, D}, {1, D, D}, {1, 2 D, D}
struct MatrixPart {
  int64_t blocks = 1;
  int64_t first = 0;
  int64_t rows = 0;  // of one block
  bool operator==(const MatrixPart&) const = default;
};

// The matrices that a tensor of TakesMuon fuses, each to be orthogonalised by itself; one, the whole, for most.
//   wqkv                 query, key, value
//   kv_a_proj_with_mqa   the compression of keys and values, and the shared rotary key
//   kv_b_proj            keys of all heads, and values of all heads (their rows alternate head by head)
std::vector<MatrixPart> MatrixParts(const ModelConfig& config, const TensorSpec& tensor);

}  // namespace moonpipe
