// Attention on the host in fp32, span by span and head by head, in blocks of queries: what SpanAttention does there.
//
// A thread has a head of a span to itself, so the bits depend neither on the threads nor on what else is packed. At most kQueryBlock rows
// of scores exist for each thread; the backward makes them again from one number a row. Blocks of a causal span stop at their last key, and
// values keep their own width.
//
// Shapes: T rows, N heads, d width of a head's query and key, v width of its value.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace moonpipe {

inline constexpr int64_t kQueryBlock = 128;

// q_TNd, k_TNd [T, N, d] and v_TNv [T, N, v], fp32 on the host -> [T, N, v]. `lengths` are the spans, one after the other; they cover the
// rows.
torch::Tensor BlockedAttention(const torch::Tensor& q_TNd, const torch::Tensor& k_TNd, const torch::Tensor& v_TNv,
                               const std::vector<int64_t>& lengths, bool causal, double scale);

}  // namespace moonpipe
