#include "moonpipe/model/label_shift.h"

#include <numeric>

#include "moonpipe/model/loss.h"

namespace moonpipe {

torch::Tensor ShiftLabels(const torch::Tensor& labels_T, const std::vector<int64_t>& document_lengths, int64_t ignore_index) {
  const int64_t tokens = std::accumulate(document_lengths.begin(), document_lengths.end(), int64_t{0});
  TORCH_CHECK(labels_T.dim() == 1 && labels_T.size(0) == tokens, "labels are ", labels_T.sizes(), ", the documents have ", tokens, " tokens");
  const torch::Tensor host_T = labels_T.to(torch::kCPU, torch::kLong).contiguous();
  torch::Tensor shifted_T = torch::full_like(host_T, kIgnoredLabel);
  const int64_t* from = host_T.const_data_ptr<int64_t>();
  int64_t* to = shifted_T.mutable_data_ptr<int64_t>();
  int64_t begin = 0;
  for (const int64_t length : document_lengths) {
    for (int64_t i = begin; i + 1 < begin + length; ++i) to[i] = from[i + 1] == ignore_index ? kIgnoredLabel : from[i + 1];
    begin += length;
  }
  return shifted_T.to(labels_T.device());
}

}  // namespace moonpipe
