// How the rows of a padded batch become packed documents: placeholders are expanded to one token a feature row, masked tokens leave,
// and what remains stands document after document. No tensors are moved here, only told where they go.
//
// A batch comes pre-expanded (a placeholder stands for one feature row) or compact (a placeholder stands for one picture); the sum of
// its placeholders says which. Its mask is binary or indexed by document (0 masked, 1..n a document), padded on either side or with
// holes. What is absent has a default:
//
//   attention_mask  every token counts
//   position_ids    count from 0 within each document and skip masked tokens, which have 1 (architecture section 7.3)
//   labels          every token, but placeholders
//
// Labels are not shifted. Those of placeholders are ignored whatever the batch says.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "moonpipe/data/v1/manifest.pb.h"

namespace moonpipe {

struct BatchInputs {
  int64_t rows = 0;
  int64_t columns = 0;
  // Each [rows, columns]; empty where the batch lacks it.
  absl::Span<const int64_t> input_ids;  // empty: the batch starts from embeddings and has no placeholders
  absl::Span<const int64_t> attention_mask;
  absl::Span<const int64_t> position_ids;
  absl::Span<const int64_t> labels;
  std::vector<int64_t> feature_rows;  // of each picture, in reading order over all rows
  // The pictures stand for none: they are encoded and no token sees them. Needs a batch without placeholders.
  bool pictures_without_place = false;
  int64_t media_token = -1;  // -1: the model has no pictures
  int64_t ignore_index = -100;
};

// One row. "Expanded" counts tokens after the placeholders were expanded, before any left.
struct RowLayout {
  std::vector<int64_t> positions;   // [expanded columns]
  // Of the packed tokens:
  std::vector<int64_t> places;      // where each stands in the expanded row
  std::vector<int64_t> columns;     // where it comes from in the given row
  std::vector<int32_t> token_ids;   // empty without input_ids
  std::vector<int32_t> labels;
  std::vector<uint32_t> document_lengths;
  // The row's pictures are first_picture to end_picture - 1.
  size_t first_picture = 0, end_picture = 0;
  // Feature rows that no packed token takes, counted from the first of this row's pictures; ascending, neighbours joined.
  std::vector<data::v1::RowSpan> masked_features;
};

struct BatchLayout {
  int64_t columns = 0;  // expanded; a shorter row is padded on the side on which it was padded
  std::vector<RowLayout> rows;
};

// INVALID_ARGUMENT, with both numbers and the row, for counts that do not fit each other, for a picture whose placeholders are not one
// run, for a mask in which a document comes back after another, and for position_ids that are not consecutive within a document.
absl::StatusOr<BatchLayout> LayOutBatch(const BatchInputs& inputs);

// Labels that a decoder trains on, not shifted: within each document all but the first that are not `ignore_index`.
uint32_t CountTrainedLabels(absl::Span<const int32_t> labels, absl::Span<const uint32_t> document_lengths, int64_t ignore_index);

}  // namespace moonpipe
