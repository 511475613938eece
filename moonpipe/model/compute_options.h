// How a model computes: choices of a run that change speed and rounding, never the function.
#pragma once

#include <torch/torch.h>

#include "moonpipe/spec/memory.h"

namespace moonpipe {

// Where RMSNorm rounds when it computes in bf16 (architecture section 0.2). In fp32 the two are one.
enum class NormRounding {
  kBeforeWeight,  // weight * round(x / rms), both factors rounded: Hugging Face's models and the published code
  kAfterWeight,   // round(weight * x / rms)
};

struct ComputeOptions {
  // Of matrix products, activations and the residual stream. Parameters, their gradients, the router, norm statistics, rotary angles and
  // the loss are fp32 whatever this says; weights are rounded where they are multiplied.
  torch::Dtype dtype = torch::kFloat;
  NormRounding norm_rounding = NormRounding::kBeforeWeight;
  // Routed experts one by one, each over the rows it gathers, instead of slices of rows sorted once. The same up to the order of addition.
  bool loop_experts = false;
  // Attention in plain steps (products, mask, softmax in fp32) instead of LibTorch's kernel. Holds all logits of a span.
  bool explicit_attention = false;
  Recompute recompute = Recompute::kNone;
};

}  // namespace moonpipe
