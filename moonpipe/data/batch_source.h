// Training steps out of one recorded batch, the same every step: a safetensors file with tensors `CASE/in/NAME`.
//
//   input_ids        int64 or int32 [rows, columns], or inputs_embeds fp32 [rows, columns, hidden] in its place
//   attention_mask, position_ids, labels   [rows, columns], each optional (batch_layout.h)
//   pixel_values     fp32, already normalised, or uint8, [patches, 3, P, P]: all pictures in reading order
//   grid_thws, image_grid_thw, image_grid_hws   [pictures, 3] or [pictures, 2], where there are pictures; several must agree
//
// A batch without placeholders may have one picture of zeros: a dummy, which passes the tower and reaches no token.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "moonpipe/common/v1/common.pb.h"
#include "moonpipe/data/batch_layout.h"
#include "moonpipe/data/step_source.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/safetensors.h"

namespace moonpipe {

struct RecordedBatch {
  BatchLayout layout;
  std::vector<common::v1::MediaGrid> grids;
  std::vector<int64_t> feature_rows;            // of each picture
  const StoredTensor* pixels = nullptr;         // in the file; null without pictures
  const StoredTensor* inputs_embeds = nullptr;  // in the file; null for a batch of token ids
};

// Reads a case. The result points into `file`. NOT_FOUND for a case without input; INVALID_ARGUMENT names the tensor and both numbers
// of what does not fit: shapes, pictures, patches, placeholders, ids beyond the vocabulary.
absl::StatusOr<RecordedBatch> ReadRecordedBatch(const SafetensorsFile& file, absl::string_view batch_case, const ModelConfig& config);

// The names of the cases in a file, sorted.
std::vector<std::string> BatchCases(const SafetensorsFile& file);

// First row of each of `microbatches` parts of `rows` rows, and `rows` at the end; parts differ by one row at most. INVALID_ARGUMENT,
// with both numbers, for more microbatches than rows.
absl::StatusOr<std::vector<size_t>> DistributeRows(size_t rows, size_t microbatches);

struct BatchSourceOptions {
  std::string file;
  std::string batch_case;
  int32_t microbatches = 1;
};
// Reads the whole batch. Errors as above.
absl::StatusOr<std::unique_ptr<StepSource>> OpenBatchSource(const BatchSourceOptions& options, const ModelConfig& config);

}  // namespace moonpipe
