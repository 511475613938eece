#include "moonpipe/model/blocked_attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "moonpipe/model/row_kernels.h"

namespace moonpipe {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// One head of one span.
struct Work {
  int64_t first_row;
  int64_t length;
  int64_t head;
};

std::vector<Work> WorkOf(const std::vector<int64_t>& lengths, int64_t heads) {
  std::vector<Work> all;
  int64_t row = 0;
  for (const int64_t length : lengths) {
    for (int64_t head = 0; head < heads; ++head) all.push_back({row, length, head});
    row += length;
  }
  return all;
}

// The rows of a head, [length, width].
Tensor HeadOf(const Tensor& x_TNd, const Work& work) { return x_TNd.narrow(0, work.first_row, work.length).select(1, work.head); }

struct QueryBlock {
  int64_t first;
  int64_t rows;
  int64_t keys;  // that any of its queries sees
};
QueryBlock BlockAt(int64_t first, int64_t length, bool causal) {
  const int64_t rows = std::min(kQueryBlock, length - first);
  return {first, rows, causal ? first + rows : length};
}

// Memory of a thread for matrices of changing sizes.
class Scratch {
 public:
  Scratch(int64_t size, const torch::TensorOptions& options) : memory_(torch::empty({size}, options)) {}
  Tensor Matrix(int64_t rows, int64_t columns) const { return memory_.narrow(0, 0, rows * columns).view({rows, columns}); }
  float* data() const { return memory_.data_ptr<float>(); }

 private:
  Tensor memory_;
};

// Calls function(begin, end) for ranges of `all`, spread over the threads. The library's products run on one thread inside.
template <typename Function>
void ForRanges(const std::vector<Work>& all, const Function& function) {
  at::parallel_for(0, static_cast<int64_t>(all.size()), 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_graph;
    function(all.begin() + begin, all.begin() + end);
  });
}

int64_t Longest(const std::vector<int64_t>& lengths) { return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end()); }

class BlockedAttentionFunction : public torch::autograd::Function<BlockedAttentionFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& q_TNd, const Tensor& k_TNd, const Tensor& v_TNv,
                        const std::vector<int64_t>& lengths, bool causal, double scale) {
    const int64_t rows = q_TNd.size(0), heads = q_TNd.size(1);
    Tensor out_TNv = torch::empty({rows, heads, v_TNv.size(2)}, q_TNd.options());
    // Of each row the logarithm of its sum of exponentials, [N, T].
    Tensor log_sums_NT = torch::empty({heads, rows}, q_TNd.options());
    float* const log_sums = log_sums_NT.data_ptr<float>();
    const auto scale32 = static_cast<float>(scale);
    const auto attend = [&](const Work& work, const Scratch& scores) {
      const Tensor q = HeadOf(q_TNd, work), k = HeadOf(k_TNd, work), v = HeadOf(v_TNv, work), out = HeadOf(out_TNv, work);
      float* const log_sum = log_sums + work.head * rows + work.first_row;
      for (int64_t first = 0; first < work.length; first += kQueryBlock) {
        const QueryBlock block = BlockAt(first, work.length, causal);
        Tensor p = scores.Matrix(block.rows, block.keys);
        at::mm_out(p, q.narrow(0, first, block.rows), k.narrow(0, 0, block.keys).t());
        float inverse_sums[kQueryBlock];
        for (int64_t row = 0; row < block.rows; ++row) {
          float* const values = scores.data() + row * block.keys;
          const int64_t seen = causal ? first + row + 1 : block.keys;
          float largest = 0;
          const float sum = rows::ExpOfRow(values, seen, scale32, &largest);
          std::fill(values + seen, values + block.keys, 0.0f);
          log_sum[first + row] = largest * scale32 + std::log(sum);
          inverse_sums[row] = 1 / sum;
        }
        Tensor out_block = out.narrow(0, first, block.rows);
        at::mm_out(out_block, p, v.narrow(0, 0, block.keys));
        float* const values = out_block.data_ptr<float>();
        for (int64_t row = 0; row < block.rows; ++row) {
          for (int64_t i = 0; i < out_block.size(1); ++i) values[row * out_block.stride(0) + i] *= inverse_sums[row];
        }
      }
    };
    const std::vector<Work> all = WorkOf(lengths, heads);
    ForRanges(all, [&](auto begin, auto end) {
      const Scratch scores(kQueryBlock * Longest(lengths), q_TNd.options());
      for (auto work = begin; work != end; ++work) attend(*work, scores);
    });
    context->save_for_backward({q_TNd, k_TNd, v_TNv, out_TNv, log_sums_NT});
    context->saved_data["lengths"] = lengths;
    context->saved_data["causal"] = causal;
    context->saved_data["scale"] = scale;
    return out_TNv;
  }

  // With P the softmax and D the sum of dO * O over a row: dV = P^T dO, dP = dO V^T, dS = P * (dP - D), dQ = dS K, dK = dS^T Q.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &q_TNd = saved[0], &k_TNd = saved[1], &v_TNv = saved[2], &out_TNv = saved[3];
    const Tensor dout_TNv = gradients[0].contiguous();
    const float* const log_sums = saved[4].const_data_ptr<float>();
    const bool causal = context->saved_data["causal"].toBool();
    const auto scale = static_cast<float>(context->saved_data["scale"].toDouble());
    const int64_t rows = q_TNd.size(0), heads = q_TNd.size(1), value_width = v_TNv.size(2);
    Tensor dq_TNd = torch::empty(q_TNd.sizes(), q_TNd.options());
    Tensor dk_TNd = torch::empty(k_TNd.sizes(), k_TNd.options());
    Tensor dv_TNv = torch::empty(v_TNv.sizes(), v_TNv.options());
    const auto lengths = context->saved_data["lengths"].toIntVector();
    const auto attend_back = [&](const Work& work, const Scratch& probabilities, const Scratch& scores, const Scratch& dk_sums,
                                 const Scratch& dv_sums) {
      const Tensor q = HeadOf(q_TNd, work), k = HeadOf(k_TNd, work), v = HeadOf(v_TNv, work), out = HeadOf(out_TNv, work);
      const Tensor dout = HeadOf(dout_TNv, work), dq = HeadOf(dq_TNd, work), dk = HeadOf(dk_TNd, work), dv = HeadOf(dv_TNv, work);
      const float* const log_sum = log_sums + work.head * rows + work.first_row;
      // Summed as columns, wide matrices, of which the library makes more than of narrow ones.
      const Tensor dk_columns = dk_sums.Matrix(k.size(1), work.length), dv_columns = dv_sums.Matrix(value_width, work.length);
      // From the last block, which sees all keys and so begins the sums of dK and dV.
      for (int64_t first = (work.length - 1) / kQueryBlock * kQueryBlock; first >= 0; first -= kQueryBlock) {
        const QueryBlock block = BlockAt(first, work.length, causal);
        const bool begins = first + kQueryBlock >= work.length;
        const Tensor q_block = q.narrow(0, first, block.rows), dout_block = dout.narrow(0, first, block.rows);
        const Tensor k_seen = k.narrow(0, 0, block.keys), out_block = out.narrow(0, first, block.rows);
        Tensor p = probabilities.Matrix(block.rows, block.keys), ds = scores.Matrix(block.rows, block.keys);
        at::mm_out(p, q_block, k_seen.t());
        at::mm_out(ds, dout_block, v.narrow(0, 0, block.keys).t());
        const float* const dout_values = dout_block.const_data_ptr<float>();
        const float* const out_values = out_block.const_data_ptr<float>();
        for (int64_t row = 0; row < block.rows; ++row) {
          float* const p_row = probabilities.data() + row * block.keys;
          float* const ds_row = scores.data() + row * block.keys;
          const int64_t seen = causal ? first + row + 1 : block.keys;
          rows::ExpShifted(p_row, seen, scale, log_sum[first + row]);
          std::fill(p_row + seen, p_row + block.keys, 0.0f);
          const float inner = rows::Dot(dout_values + row * dout_block.stride(0), out_values + row * out_block.stride(0), value_width);
          rows::SoftmaxGradient(p_row, ds_row, seen, scale, inner);
          std::fill(ds_row + seen, ds_row + block.keys, 0.0f);
        }
        Tensor dq_block = dq.narrow(0, first, block.rows);
        at::mm_out(dq_block, ds, k_seen);
        Tensor dk_seen = dk_columns.narrow(1, 0, block.keys), dv_seen = dv_columns.narrow(1, 0, block.keys);
        if (begins) {
          at::mm_out(dk_seen, q_block.t(), ds);
          at::mm_out(dv_seen, dout_block.t(), p);
        } else {
          dk_seen.addmm_(q_block.t(), ds);
          dv_seen.addmm_(dout_block.t(), p);
        }
      }
      dk.copy_(dk_columns.t());
      dv.copy_(dv_columns.t());
    };
    const std::vector<Work> all = WorkOf(lengths, heads);
    const int64_t longest = Longest(lengths);
    ForRanges(all, [&](auto begin, auto end) {
      const Scratch probabilities(kQueryBlock * longest, q_TNd.options()), scores(kQueryBlock * longest, q_TNd.options());
      const Scratch dk_sums(q_TNd.size(2) * longest, q_TNd.options()), dv_sums(value_width * longest, q_TNd.options());
      for (auto work = begin; work != end; ++work) attend_back(*work, probabilities, scores, dk_sums, dv_sums);
    });
    return {dq_TNd, dk_TNd, dv_TNv, Tensor(), Tensor(), Tensor()};
  }
};

// A product needs rows without gaps, whatever lies between the rows.
Tensor WithDenseRows(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

}  // namespace

Tensor BlockedAttention(const Tensor& q_TNd, const Tensor& k_TNd, const Tensor& v_TNv, const std::vector<int64_t>& lengths, bool causal,
                        double scale) {
  return BlockedAttentionFunction::apply(WithDenseRows(q_TNd), WithDenseRows(k_TNd), WithDenseRows(v_TNv), lengths, causal, scale);
}

}  // namespace moonpipe
