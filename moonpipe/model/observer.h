// Shows intermediate tensors to a test or a parity tool. Names are those of the recorded references: `vision.layers.0`, `projected`,
// `inputs_embeds`, `layers.2.self_attn`, `router.layers.1.indices`, `norm`, `logits`.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>

namespace moonpipe {

// Empty: nobody looks, and no name is ever built.
using TensorObserver = std::function<void(const std::string& name, const torch::Tensor& value)>;

}  // namespace moonpipe
