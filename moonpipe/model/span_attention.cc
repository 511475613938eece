#include "moonpipe/model/span_attention.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "moonpipe/model/blocked_attention.h"
#include "moonpipe/model/rows.h"

namespace moonpipe {

using torch::Tensor;

namespace {

// Rows of scores that LargestCausalLogits holds at once, over all spans of a length.
constexpr int64_t kLogitRows = 1024;

// The rows of each group of spans, [spans, heads, length, width].
std::vector<Tensor> ByGroup(const Tensor& x_TNd, const SpanLayout& layout) {
  const Tensor rows = layout.needs_order() ? PermuteRows(x_TNd, layout.order(), layout.inverse()) : x_TNd;
  std::vector<int64_t> sizes;
  for (const SpanLayout::Group& group : layout.groups()) sizes.push_back(group.length * group.count);
  std::vector<Tensor> groups = sizes.size() == 1 ? std::vector<Tensor>{rows} : rows.split_with_sizes(sizes);
  for (size_t i = 0; i < groups.size(); ++i) {
    const SpanLayout::Group& group = layout.groups()[i];
    groups[i] = groups[i].unflatten(0, {group.count, group.length}).transpose(1, 2);
  }
  return groups;
}

// True where query first + i must not see key j.
Tensor FutureKeys(int64_t first, int64_t queries, int64_t keys, torch::Device device) {
  return torch::ones({queries, keys}, torch::dtype(torch::kBool).device(device)).triu(first + 1);
}

Tensor AttendInSteps(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale) {
  Tensor logits = at::matmul(q, k.transpose(-1, -2)).to(torch::kFloat) * scale;
  if (causal) logits = logits.masked_fill(FutureKeys(0, q.size(2), k.size(2), q.device()), -std::numeric_limits<float>::infinity());
  return at::matmul(logits.softmax(-1).to(v.scalar_type()), v);
}

}  // namespace

SpanLayout::SpanLayout(std::vector<int64_t> lengths, torch::Device device) : lengths_(std::move(lengths)) {
  std::vector<std::vector<int64_t>> starts;
  bool in_order = true;
  for (const int64_t length : lengths_) {
    TORCH_CHECK(length > 0, "a span of ", length, " rows: spans hold at least one");
    auto group = std::find_if(groups_.begin(), groups_.end(), [&](const Group& known) { return known.length == length; });
    if (group == groups_.end()) {
      groups_.push_back({length, 0, 0});
      starts.emplace_back();
      group = groups_.end() - 1;
    }
    in_order = in_order && group + 1 == groups_.end();
    group->count += 1;
    starts[static_cast<size_t>(group - groups_.begin())].push_back(num_rows_);
    num_rows_ += length;
  }
  int64_t row = 0;
  for (Group& group : groups_) {
    group.first_row = row;
    row += group.length * group.count;
  }
  if (in_order) return;
  Tensor order = torch::empty({num_rows_}, torch::kLong);
  Tensor inverse = torch::empty({num_rows_}, torch::kLong);
  int64_t next = 0;
  for (size_t group = 0; group < groups_.size(); ++group) {
    for (const int64_t start : starts[group]) {
      for (int64_t i = 0; i < groups_[group].length; ++i, ++next) {
        order.data_ptr<int64_t>()[next] = start + i;
        inverse.data_ptr<int64_t>()[start + i] = next;
      }
    }
  }
  order_ = order.to(device);
  inverse_ = inverse.to(device);
}

Tensor SpanAttention(const Tensor& q_TNd, const Tensor& k_TNd, const Tensor& v_TNv, const SpanLayout& layout, bool causal, double scale,
                     bool in_steps) {
  TORCH_CHECK(q_TNd.size(0) == layout.num_rows(), "attention over ", q_TNd.size(0), " rows, but the spans cover ", layout.num_rows());
  if (!in_steps && q_TNd.is_cpu() && q_TNd.scalar_type() == torch::kFloat) {
    return BlockedAttention(q_TNd, k_TNd, v_TNv, layout.lengths(), causal, scale);
  }
  // Values of the query's width keep the library's fast paths; the extra columns are zeros in and zeros out.
  const int64_t padding = q_TNd.size(2) - v_TNv.size(2);
  const bool pads = padding > 0 && !in_steps;
  const std::vector<Tensor> q = ByGroup(q_TNd, layout);
  const std::vector<Tensor> k = ByGroup(k_TNd, layout);
  const std::vector<Tensor> v = ByGroup(pads ? at::constant_pad_nd(v_TNv, {0, padding}, 0) : v_TNv, layout);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < q.size(); ++i) {
    const Tensor attended = in_steps ? AttendInSteps(q[i], k[i], v[i], causal, scale)
                                     : at::scaled_dot_product_attention(q[i], k[i], v[i], std::nullopt, 0.0, causal, scale);
    outputs.push_back(attended.transpose(1, 2).flatten(0, 1));
  }
  Tensor all = outputs.size() == 1 ? outputs.front() : torch::cat(outputs);
  if (pads) all = all.narrow(2, 0, v_TNv.size(2));
  return layout.needs_order() ? PermuteRows(all, layout.inverse(), layout.order()) : all;
}

Tensor LargestCausalLogits(const Tensor& q_TNd, const Tensor& k_TNd, const SpanLayout& layout, double scale) {
  const torch::NoGradGuard no_grad;
  const std::vector<Tensor> q = ByGroup(q_TNd.to(torch::kFloat), layout);
  const std::vector<Tensor> k = ByGroup(k_TNd.to(torch::kFloat), layout);
  Tensor largest_N = torch::full({q_TNd.size(1)}, -std::numeric_limits<float>::infinity(), torch::dtype(torch::kFloat).device(q_TNd.device()));
  for (size_t i = 0; i < q.size(); ++i) {
    const int64_t length = q[i].size(2);
    const int64_t block = std::max<int64_t>(kLogitRows / q[i].size(0), 1);
    for (int64_t first = 0; first < length; first += block) {
      const int64_t rows = std::min(block, length - first);
      const int64_t keys = first + rows;
      Tensor logits = at::matmul(q[i].narrow(2, first, rows), k[i].narrow(2, 0, keys).transpose(-1, -2));
      logits.masked_fill_(FutureKeys(first, rows, keys, q_TNd.device()), -std::numeric_limits<float>::infinity());
      largest_N = torch::maximum(largest_N, logits.amax({0, 2, 3}));
    }
  }
  return largest_N.mul_(scale);
}

}  // namespace moonpipe
