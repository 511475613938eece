#include "moonpipe/data/batch_source.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/microbatch.h"

namespace moonpipe {
namespace {

constexpr absl::string_view kInputs = "/in/";
constexpr const char* kGridNames[] = {"grid_thws", "image_grid_thw", "image_grid_hws"};

// The inputs of one case.
class CaseReader {
 public:
  CaseReader(const SafetensorsFile& file, absl::string_view batch_case) : file_(file), prefix_(absl::StrCat(batch_case, kInputs)) {}

  // Null where the case lacks it.
  const StoredTensor* Find(absl::string_view name) const {
    const auto found = file_.Find(absl::StrCat(prefix_, name));
    return found.ok() ? *found : nullptr;
  }

  absl::Status Wrong(const StoredTensor& tensor, absl::string_view wanted) const {
    return absl::InvalidArgumentError(absl::StrCat(file_.path(), ": ", tensor.name, " is ", tensor.ToString(), ", ", wanted, " was expected"));
  }

  // Empty where the case lacks it.
  absl::StatusOr<std::vector<int64_t>> Numbers(const StoredTensor* tensor) const {
    std::vector<int64_t> values;
    if (tensor == nullptr) return values;
    values.resize(tensor->num_elements());
    if (tensor->type == StoredType::kI64) {
      std::memcpy(values.data(), tensor->data, tensor->num_bytes());
    } else if (tensor->type == StoredType::kI32) {
      const auto* narrow = static_cast<const int32_t*>(tensor->data);
      std::copy(narrow, narrow + values.size(), values.begin());
    } else if (tensor->type == StoredType::kBool || tensor->type == StoredType::kU8) {
      const auto* bytes = static_cast<const uint8_t*>(tensor->data);
      std::copy(bytes, bytes + values.size(), values.begin());
    } else {
      return Wrong(*tensor, "I64 or I32");
    }
    return values;
  }

  // [rows, columns] of whole numbers; empty where absent.
  absl::StatusOr<std::vector<int64_t>> Table(absl::string_view name, const std::vector<int64_t>& shape) const {
    const StoredTensor* tensor = Find(name);
    if (tensor != nullptr && tensor->shape != shape) return Wrong(*tensor, absl::StrCat("[", absl::StrJoin(shape, ", "), "]"));
    return Numbers(tensor);
  }

  absl::StatusOr<std::vector<common::v1::MediaGrid>> Grids() const {
    std::optional<std::vector<common::v1::MediaGrid>> grids;
    std::string first;
    for (const char* name : kGridNames) {
      const StoredTensor* tensor = Find(name);
      if (tensor == nullptr) continue;
      if (tensor->shape.size() != 2 || (tensor->shape[1] != 2 && tensor->shape[1] != 3)) return Wrong(*tensor, "[pictures, 3] or [pictures, 2]");
      MOONPIPE_ASSIGN_OR_RETURN(const std::vector<int64_t> sides, Numbers(tensor));
      const auto width = static_cast<size_t>(tensor->shape[1]);
      std::vector<common::v1::MediaGrid> read;
      for (size_t i = 0; i < sides.size(); i += width) {
        common::v1::MediaGrid& grid = read.emplace_back();
        for (size_t side = 0; side < width; ++side) {
          if (sides[i + side] < 1 || sides[i + side] > UINT16_MAX) {
            return absl::InvalidArgumentError(absl::StrCat(tensor->name, ": picture ", i / width, " has a side of ", sides[i + side], " patches"));
          }
        }
        grid.set_frames(width == 3 ? static_cast<uint32_t>(sides[i]) : 1);
        grid.set_rows(static_cast<uint32_t>(sides[i + width - 2]));
        grid.set_columns(static_cast<uint32_t>(sides[i + width - 1]));
      }
      if (!grids.has_value()) {
        grids = std::move(read);
        first = name;
        continue;
      }
      MOONPIPE_RETURN_IF_ERROR(Agree(first, *grids, name, read));
    }
    return std::move(grids).value_or(std::vector<common::v1::MediaGrid>());
  }

 private:
  static absl::Status Agree(const std::string& a_name, const std::vector<common::v1::MediaGrid>& a, const std::string& b_name,
                            const std::vector<common::v1::MediaGrid>& b) {
    if (a.size() != b.size()) {
      return absl::InvalidArgumentError(absl::StrCat(a_name, " has ", a.size(), " pictures, ", b_name, " has ", b.size()));
    }
    const auto text = [](const common::v1::MediaGrid& grid) { return absl::StrCat(grid.frames(), " x ", grid.rows(), " x ", grid.columns()); };
    for (size_t i = 0; i < a.size(); ++i) {
      if (text(a[i]) == text(b[i])) continue;
      return absl::InvalidArgumentError(absl::StrCat(a_name, " and ", b_name, " differ: picture ", i, " is ", text(a[i]), " and ", text(b[i])));
    }
    return absl::OkStatus();
  }

  const SafetensorsFile& file_;
  const std::string prefix_;
};

// A picture of nothing but zeros.
bool IsDummy(const RecordedBatch& batch) {
  if (batch.grids.size() != 1 || batch.pixels == nullptr) return false;
  const auto* bytes = static_cast<const char*>(batch.pixels->data);
  return std::all_of(bytes, bytes + batch.pixels->num_bytes(), [](char byte) { return byte == 0; });
}

absl::Status CheckPictures(const CaseReader& reader, const VisionConfig& vision, RecordedBatch& batch) {
  int64_t patches = 0;
  for (size_t i = 0; i < batch.grids.size(); ++i) {
    const common::v1::MediaGrid& grid = batch.grids[i];
    if (grid.frames() > vision.init_pos_emb_time) {
      return absl::InvalidArgumentError(absl::StrCat("picture ", i, " has ", grid.frames(), " frames, the model's tower takes ", vision.init_pos_emb_time));
    }
    if (grid.rows() % vision.merge_height != 0 || grid.columns() % vision.merge_width != 0) {
      return absl::InvalidArgumentError(absl::StrCat("picture ", i, " has ", grid.rows(), " x ", grid.columns(), " patches; rows must be a multiple of ",
                                                     vision.merge_height, " and columns of ", vision.merge_width));
    }
    patches += int64_t{grid.frames()} * grid.rows() * grid.columns();
    batch.feature_rows.push_back(int64_t{grid.rows()} * grid.columns() / (vision.merge_height * vision.merge_width));
  }
  const std::vector<int64_t> shape = {patches, 3, vision.patch_size, vision.patch_size};
  if (batch.pixels->shape != shape || (batch.pixels->type != StoredType::kF32 && batch.pixels->type != StoredType::kU8)) {
    return reader.Wrong(*batch.pixels, absl::StrCat("F32 or U8 [", absl::StrJoin(shape, ", "), "] for ", batch.grids.size(), " pictures"));
  }
  return absl::OkStatus();
}

class RecordedBatchSource : public StepSource {
 public:
  explicit RecordedBatchSource(Step step, uint64_t rows) : step_(std::move(step)), rows_(rows) {}

  uint64_t size() const override { return rows_; }

  absl::StatusOr<Step> Make(uint64_t number, const data::v1::DataCursor& cursor) override {
    Step step = step_;
    step.manifest.set_step(number);
    // Every step is one passage over the batch.
    *step.manifest.mutable_next_cursor() = cursor;
    step.manifest.mutable_next_cursor()->set_epoch(cursor.epoch() + 1);
    return step;
  }

 private:
  const Step step_;
  const uint64_t rows_;
};

void AppendPictures(const RecordedBatch& batch, const std::vector<size_t>& offsets, const RowLayout& row, data::v1::MicrobatchManifest& manifest,
                    Microbatch& microbatch) {
  for (const data::v1::RowSpan& span : row.masked_features) {
    data::v1::RowSpan& masked = *manifest.add_masked_features();
    masked.set_begin(manifest.feature_rows() + span.begin());
    masked.set_end(manifest.feature_rows() + span.end());
  }
  if (row.first_picture == row.end_picture) return;
  for (size_t i = row.first_picture; i < row.end_picture; ++i) {
    *manifest.add_grids() = batch.grids[i];
    manifest.set_feature_rows(manifest.feature_rows() + static_cast<uint32_t>(batch.feature_rows[i]));
  }
  const auto* bytes = static_cast<const uint8_t*>(batch.pixels->data);
  microbatch.patches.insert(microbatch.patches.end(), bytes + offsets[row.first_picture], bytes + offsets[row.end_picture]);
  manifest.set_pixel_type(batch.pixels->type == StoredType::kU8 ? data::v1::PIXEL_TYPE_U8 : data::v1::PIXEL_TYPE_F32);
}

absl::StatusOr<Step> MakeStep(const RecordedBatch& batch, size_t microbatches, const ModelConfig& config) {
  MOONPIPE_ASSIGN_OR_RETURN(const std::vector<size_t> first, DistributeRows(batch.layout.rows.size(), microbatches));
  std::vector<size_t> offsets = {0};  // of each picture's first byte
  for (const common::v1::MediaGrid& grid : batch.grids) {
    const size_t patch_bytes = batch.pixels->num_bytes() / static_cast<size_t>(batch.pixels->shape[0]);
    offsets.push_back(offsets.back() + patch_bytes * grid.frames() * grid.rows() * grid.columns());
  }
  Step step;
  std::vector<std::string> digests;
  for (size_t m = 0; m < microbatches; ++m) {
    data::v1::MicrobatchManifest& manifest = *step.manifest.add_microbatches();
    Microbatch& microbatch = step.microbatches.emplace_back();
    manifest.set_index(static_cast<uint32_t>(m));
    for (size_t r = first[m]; r < first[m + 1]; ++r) {
      const RowLayout& row = batch.layout.rows[r];
      microbatch.token_ids.insert(microbatch.token_ids.end(), row.token_ids.begin(), row.token_ids.end());
      microbatch.labels.insert(microbatch.labels.end(), row.labels.begin(), row.labels.end());
      for (const uint32_t length : row.document_lengths) {
        manifest.add_document_lengths(length);
        manifest.add_samples(r);
      }
      AppendPictures(batch, offsets, row, manifest, microbatch);
      if (batch.inputs_embeds == nullptr) continue;
      const auto hidden = static_cast<size_t>(config.text.hidden_size);
      const float* values = static_cast<const float*>(batch.inputs_embeds->data) + r * static_cast<size_t>(batch.inputs_embeds->shape[1]) * hidden;
      for (const int64_t column : row.columns) {
        const float* begin = values + static_cast<size_t>(column) * hidden;
        microbatch.embeddings.insert(microbatch.embeddings.end(), begin, begin + hidden);
      }
    }
    if (microbatch.labels.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("microbatch ", m, " of ", microbatches, " would have no token: its rows ", first[m], " to ",
                                                     first[m + 1] - 1, " are masked whole"));
    }
    manifest.set_has_embeddings(batch.inputs_embeds != nullptr);
    manifest.set_tokens(static_cast<uint32_t>(microbatch.labels.size()));
    const std::vector<uint32_t> lengths(manifest.document_lengths().begin(), manifest.document_lengths().end());
    manifest.set_trained_labels(CountTrainedLabels(microbatch.labels, lengths, config.ignore_index));
    const auto bytes = [](const auto& values) {
      return absl::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
    };
    digests.push_back(absl::StrCat(Sha256Hex(bytes(microbatch.patches)), Sha256Hex(bytes(microbatch.embeddings))));
  }
  step.manifest.set_digest(StepDigest(step, digests));
  return step;
}

}  // namespace

absl::StatusOr<RecordedBatch> ReadRecordedBatch(const SafetensorsFile& file, absl::string_view batch_case, const ModelConfig& config) {
  const CaseReader reader(file, batch_case);
  RecordedBatch batch;
  const StoredTensor* ids = reader.Find("input_ids");
  batch.inputs_embeds = reader.Find("inputs_embeds");
  if (ids == nullptr && batch.inputs_embeds == nullptr) {
    return absl::NotFoundError(absl::StrCat(file.path(), " has no tensor ", batch_case, kInputs, "input_ids; its cases are ",
                                            absl::StrJoin(BatchCases(file), ", ")));
  }
  if (ids != nullptr && batch.inputs_embeds != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(batch_case, " has input_ids and inputs_embeds; a batch starts from one of them"));
  }
  BatchInputs inputs;
  if (ids != nullptr) {
    if (ids->shape.size() != 2) return reader.Wrong(*ids, "[rows, columns]");
    inputs.rows = ids->shape[0];
    inputs.columns = ids->shape[1];
  } else {
    const auto& shape = batch.inputs_embeds->shape;
    if (batch.inputs_embeds->type != StoredType::kF32 || shape.size() != 3 || shape[2] != config.text.hidden_size) {
      return reader.Wrong(*batch.inputs_embeds, absl::StrCat("F32[rows, columns, ", config.text.hidden_size, "]"));
    }
    inputs.rows = shape[0];
    inputs.columns = shape[1];
  }
  const std::vector<int64_t> shape = {inputs.rows, inputs.columns};
  MOONPIPE_ASSIGN_OR_RETURN(const std::vector<int64_t> token_ids, reader.Table("input_ids", shape));
  MOONPIPE_ASSIGN_OR_RETURN(const std::vector<int64_t> mask, reader.Table("attention_mask", shape));
  MOONPIPE_ASSIGN_OR_RETURN(const std::vector<int64_t> positions, reader.Table("position_ids", shape));
  MOONPIPE_ASSIGN_OR_RETURN(const std::vector<int64_t> labels, reader.Table("labels", shape));
  for (const int64_t id : token_ids) {
    if (id < 0 || id >= config.text.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(batch_case, " has the token id ", id, ", the model's vocabulary ", config.text.vocab_size));
    }
  }
  MOONPIPE_ASSIGN_OR_RETURN(batch.grids, reader.Grids());
  batch.pixels = reader.Find("pixel_values");
  if ((batch.pixels == nullptr) != batch.grids.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(batch_case, " has ", batch.grids.size(), " picture grids and ",
                                                   batch.pixels == nullptr ? "no" : "some", " pixel_values; pictures need both"));
  }
  if (!batch.grids.empty()) {
    if (!config.vision.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(batch_case, " has ", batch.grids.size(), " pictures, the model takes 0: it has no tower"));
    }
    if (batch.inputs_embeds != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(batch_case, " starts from inputs_embeds, which hold its pictures' features already, and has ",
                                                     batch.grids.size(), " pictures besides; 0 were expected"));
    }
    MOONPIPE_RETURN_IF_ERROR(CheckPictures(reader, *config.vision, batch));
  }
  inputs.input_ids = token_ids;
  inputs.attention_mask = mask;
  inputs.position_ids = positions;
  inputs.labels = labels;
  inputs.feature_rows = batch.feature_rows;
  inputs.media_token = config.vision.has_value() ? config.media_placeholder_token_id : -1;
  inputs.ignore_index = config.ignore_index;
  inputs.pictures_without_place =
      IsDummy(batch) && std::find(token_ids.begin(), token_ids.end(), inputs.media_token) == token_ids.end();
  absl::StatusOr<BatchLayout> layout = LayOutBatch(inputs);
  if (!layout.ok()) return absl::InvalidArgumentError(absl::StrCat(file.path(), ", ", batch_case, ": ", layout.status().message()));
  batch.layout = *std::move(layout);
  return batch;
}

std::vector<std::string> BatchCases(const SafetensorsFile& file) {
  std::set<std::string> cases;
  for (const StoredTensor& tensor : file.tensors()) {
    for (const absl::string_view input : {"/in/input_ids", "/in/inputs_embeds"}) {
      if (absl::EndsWith(tensor.name, input)) cases.insert(tensor.name.substr(0, tensor.name.size() - input.size()));
    }
  }
  return {cases.begin(), cases.end()};
}

absl::StatusOr<std::vector<size_t>> DistributeRows(size_t rows, size_t microbatches) {
  if (microbatches < 1 || microbatches > rows) {
    return absl::InvalidArgumentError(absl::StrCat(microbatches, " microbatches cannot hold the batch's ", rows,
                                                   " rows: each takes at least one row whole"));
  }
  std::vector<size_t> first;
  for (size_t m = 0; m <= microbatches; ++m) first.push_back(m * rows / microbatches);
  return first;
}

absl::StatusOr<std::unique_ptr<StepSource>> OpenBatchSource(const BatchSourceOptions& options, const ModelConfig& config) {
  MOONPIPE_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(options.file));
  MOONPIPE_ASSIGN_OR_RETURN(const RecordedBatch batch, ReadRecordedBatch(file, options.batch_case, config));
  MOONPIPE_ASSIGN_OR_RETURN(Step step, MakeStep(batch, static_cast<size_t>(options.microbatches), config));
  return std::make_unique<RecordedBatchSource>(std::move(step), batch.layout.rows.size());
}

}  // namespace moonpipe
