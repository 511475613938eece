// Writes picture features over the embeddings of their placeholder tokens.
//
// Shapes: T tokens, H hidden, M placeholders.
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace moonpipe {

// Positions of the placeholder among token_ids_T int64 [T], int64 [M] ascending.
torch::Tensor MediaPositions(const torch::Tensor& token_ids_T, int64_t media_token);

// embeddings_TH with row positions_M[i] replaced by features_MH[i], cast to the embeddings' dtype. `features_MH` may be undefined where
// there is no placeholder. Throws c10::Error with both numbers unless every placeholder has exactly one row.
torch::Tensor ScatterMedia(const torch::Tensor& embeddings_TH, const torch::Tensor& positions_M, const torch::Tensor& features_MH);

}  // namespace moonpipe
