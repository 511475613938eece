#include "moonpipe/model/span_attention.h"

#include <algorithm>
#include <numeric>

#include "moonpipe/model/rows.h"

namespace moonpipe {

using torch::Tensor;

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

Tensor SpanAttention(const Tensor& q_TNd, const Tensor& k_TNd, const Tensor& v_TNd, const SpanLayout& layout, bool causal, double scale) {
  TORCH_CHECK(q_TNd.size(0) == layout.num_rows(), "attention over ", q_TNd.size(0), " rows, but the spans cover ", layout.num_rows());
  std::vector<int64_t> sizes;
  for (const SpanLayout::Group& group : layout.groups()) sizes.push_back(group.length * group.count);
  const auto by_group = [&](const Tensor& x) {
    const Tensor rows = layout.needs_order() ? PermuteRows(x, layout.order(), layout.inverse()) : x;
    return sizes.size() == 1 ? std::vector<Tensor>{rows} : rows.split_with_sizes(sizes);
  };
  const std::vector<Tensor> q = by_group(q_TNd);
  const std::vector<Tensor> k = by_group(k_TNd);
  const std::vector<Tensor> v = by_group(v_TNd);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const SpanLayout::Group& group = layout.groups()[i];
    const auto batched = [&](const Tensor& x) { return x.unflatten(0, {group.count, group.length}).transpose(1, 2); };
    const Tensor attended = at::scaled_dot_product_attention(batched(q[i]), batched(k[i]), batched(v[i]), std::nullopt, 0.0, causal, scale);
    outputs.push_back(attended.transpose(1, 2).flatten(0, 1));
  }
  const Tensor all = outputs.size() == 1 ? outputs.front() : torch::cat(outputs);
  return layout.needs_order() ? PermuteRows(all, layout.inverse(), layout.order()) : all;
}

}  // namespace moonpipe
