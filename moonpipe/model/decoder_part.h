// Decoder layers [first, end) of a model, with the embedding and the head where the part has them:
//
//   token ids [T] -> embed -> write features -> layers -> norm -> head -> logits [T, V]       (one part)
//   token ids [T] -> embed -> write features -> layers -> hidden [T, H]                       (first of several)
//   hidden [T, H] -> layers -> norm -> head -> logits [T, V]                                  (last of several)
//
// Rows are whole documents packed one after the other, without padding; positions start at 0 in each. Splitting a model into parts
// changes no bit of any result.
//
// Shapes: T tokens, H hidden, V vocabulary, M media placeholders, E experts.
#pragma once

#include <torch/torch.h>

#include <map>
#include <vector>

#include "moonpipe/model/decoder_layer.h"
#include "moonpipe/model/observer.h"
#include "moonpipe/model/parameter_store.h"

namespace moonpipe {

struct DecoderInput {
  torch::Tensor tokens_or_hidden;        // int64 [T] for the part with the embedding, else [T, H]
  std::vector<int64_t> document_lengths;  // sum T, each above 0
  torch::Tensor features_MH;             // part with the embedding only; undefined without pictures
  // Part with the embedding only: input embeddings [T, H], features merged already, in place of token ids. Where defined, tokens_or_hidden
  // and features_MH must not be.
  torch::Tensor embeddings_TH = {};
  // Which rows the head multiplies: those of logit_rows (int64 [K], any order) where defined, else the last `logits_to_keep` rows of each
  // document, and with 0 all.
  int64_t logits_to_keep = 0;
  torch::Tensor logit_rows = {};
  bool skip_head = false;    // the part with the head stops before it: for a loss that multiplies by it itself
  bool last_hidden = false;  // the part with the head also gives what its head multiplies, for all rows
  // Above 0: each layer with experts also trains this times BalanceLoss. For a weight w of the mean over a step's documents, w / documents.
  double balance_scale = 0;
  bool largest_logits = false;  // records them, at the cost of the products of queries and keys again
};

// Tokens that each expert of a layer got, in this forward.
struct ExpertLoad {
  int64_t layer = 0;
  torch::Tensor counts_E;      // int64 on the host
  torch::Tensor balance_loss;  // the scaled loss, fp32 without a graph; undefined without
};

// Largest attention logit before the softmax of each head of a layer, in this forward.
struct HeadLogits {
  int64_t layer = 0;
  torch::Tensor largest_N;  // fp32
};

struct DecoderOutput {
  torch::Tensor hidden_or_logits;  // logits of the part with the head, one row each row that was kept, in the weights' dtype
  torch::Tensor last_hidden_TH;    // normed; where asked for
  std::vector<ExpertLoad> loads;   // one per layer with experts, ascending
  std::vector<HeadLogits> logits;  // where asked for, one per layer whose query and key weights are trained, ascending
};

// Not safe for use from two threads at once.
class DecoderPart {
 public:
  // Keeps handles to the store's parameters, not the store.
  explicit DecoderPart(const ParameterStore& store);

  // Builds the graph unless gradients are off. Throws c10::Error for rows that do not add up, with both numbers.
  DecoderOutput Forward(const DecoderInput& input);

  // Moves the correction of a layer of this part; counts summed over the whole step.
  void UpdateCorrection(int64_t layer, const torch::Tensor& counts_E, double rate, BiasRule rule = BiasRule::kSign);

  // QK-clip of a layer of this part, see LatentAttention::ClipHeads; logits are the largest of the whole step.
  int64_t ClipHeads(int64_t layer, const std::vector<double>& largest_logits_N, double threshold);

  // The next forwards send each token to these experts of a layer, int64 [T, K] ascending in each row, instead of those that its router
  // would choose; an undefined tensor ends that. The weights stay the router's.
  void PinRouting(int64_t layer, const torch::Tensor& indices_TK);

  void set_observer(TensorObserver observer) { observer_ = std::move(observer); }

 private:
  torch::Tensor Embed(const DecoderInput& input) const;
  const DecoderLayer& LayerOf(int64_t layer) const;
  torch::Tensor Pinned(int64_t layer) const;
  RotaryTable Rotary(const std::vector<int64_t>& document_lengths);

  TextConfig config_;
  ComputeOptions compute_;
  int64_t media_token_;
  torch::Device device_;
  torch::Tensor embedding_;   // undefined without
  torch::Tensor final_norm_;  // undefined without head
  torch::Tensor head_;
  std::vector<DecoderLayer> layers_;
  std::map<int64_t, torch::Tensor> pinned_TK_;  // by layer
  // Angles of positions 0 .. n, grown to the longest document seen.
  RotaryTable positions_;
  TensorObserver observer_;
};

}  // namespace moonpipe
