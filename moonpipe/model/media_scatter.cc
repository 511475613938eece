#include "moonpipe/model/media_scatter.h"

namespace moonpipe {

torch::Tensor MediaPositions(const torch::Tensor& token_ids_T, int64_t media_token) {
  return (token_ids_T == media_token).nonzero().flatten();
}

torch::Tensor ScatterMedia(const torch::Tensor& embeddings_TH, const torch::Tensor& positions_M, const torch::Tensor& features_MH) {
  const int64_t rows = features_MH.defined() ? features_MH.size(0) : 0;
  TORCH_CHECK(rows == positions_M.size(0), "the vision tower gave ", rows, " feature rows, but the tokens have ", positions_M.size(0),
              " media placeholders; each placeholder takes one row: check the image processor's grids against the prompt");
  if (rows == 0) return embeddings_TH;
  TORCH_CHECK(features_MH.size(1) == embeddings_TH.size(1), "feature rows are ", features_MH.size(1), " wide, the decoder's hidden size is ",
              embeddings_TH.size(1));
  return embeddings_TH.index_copy(0, positions_M, features_MH.to(embeddings_TH.scalar_type()));
}

}  // namespace moonpipe
