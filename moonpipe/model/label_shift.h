// Labels travel as they stand at their tokens and are shifted here, once, by the part that computes the loss.
//
// Shapes: T tokens.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace moonpipe {

// labels_T int64 [T] of packed documents -> what each row predicts: entry i is labels_T[i + 1] within the same document, and kIgnoredLabel
// at a document's end and where the label is `ignore_index`. Throws c10::Error, with both numbers, for lengths that do not sum to T.
torch::Tensor ShiftLabels(const torch::Tensor& labels_T, const std::vector<int64_t>& document_lengths, int64_t ignore_index);

}  // namespace moonpipe
