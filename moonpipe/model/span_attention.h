// Attention of a packed sequence whose rows are cut into spans (documents, or pictures) that never see each other. No mask over
// sequence x sequence exists, and a span has the same bits in any company.
//
// Shapes: T rows, N heads, d width of query and key, v width of the value.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace moonpipe {

// How consecutive spans cover T rows.
class SpanLayout {
 public:
  // Lengths above 0, in the order of the rows.
  SpanLayout(std::vector<int64_t> lengths, torch::Device device);

  struct Group {
    int64_t length = 0;
    int64_t count = 0;
    int64_t first_row = 0;  // in grouped order
  };

  int64_t num_rows() const { return num_rows_; }
  const std::vector<int64_t>& lengths() const { return lengths_; }
  // By first appearance of the length.
  const std::vector<Group>& groups() const { return groups_; }
  // Grouped order lists spans of equal length together. False: the rows stand in it already, and order and inverse are undefined.
  bool needs_order() const { return order_.defined(); }
  const torch::Tensor& order() const { return order_; }
  const torch::Tensor& inverse() const { return inverse_; }

 private:
  std::vector<int64_t> lengths_;
  int64_t num_rows_ = 0;
  std::vector<Group> groups_;
  torch::Tensor order_;
  torch::Tensor inverse_;
};

// softmax(scale * q k^T) v within each span, lower triangle only if causal. q, k [T, N, d] and v [T, N, v] -> [T, N, v]. In fp32 on the host
// it is BlockedAttention, elsewhere LibTorch's kernel, span lengths grouped; `in_steps` multiplies, masks and takes the softmax (in fp32) in
// plain operations that hold every logit.
torch::Tensor SpanAttention(const torch::Tensor& q_TNd, const torch::Tensor& k_TNd, const torch::Tensor& v_TNv, const SpanLayout& layout,
                            bool causal, double scale, bool in_steps = false);

// Largest scale * q k of each head over all pairs that causal attention looks at, fp32 [N], without a graph. Costs the products again, a
// block of rows at a time.
torch::Tensor LargestCausalLogits(const torch::Tensor& q_TNd, const torch::Tensor& k_TNd, const SpanLayout& layout, double scale);

}  // namespace moonpipe
