#include "moonpipe/data/microbatch.h"

#include <string>

#include "absl/strings/escaping.h"
#include "moonpipe/base/file.h"
#include "moonpipe/data/batch_layout.h"

namespace moonpipe {
namespace {

void AppendNumber(uint64_t value, std::string& bytes) {
  for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<char>(value >> shift & 0xff));
}

void AppendNumbers(const std::vector<int32_t>& values, std::string& bytes) {
  AppendNumber(values.size(), bytes);
  for (const int32_t value : values) {
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(static_cast<uint32_t>(value) >> shift & 0xff));
  }
}

}  // namespace

void AppendMicrobatch(const std::vector<Document>& documents, int32_t merge, int64_t ignore_index, Step& step) {
  data::v1::MicrobatchManifest& manifest = *step.manifest.add_microbatches();
  Microbatch& microbatch = step.microbatches.emplace_back();
  manifest.set_index(static_cast<uint32_t>(step.microbatches.size() - 1));
  uint32_t feature_rows = 0;
  for (const Document& document : documents) {
    microbatch.token_ids.insert(microbatch.token_ids.end(), document.token_ids->begin(), document.token_ids->end());
    microbatch.labels.insert(microbatch.labels.end(), document.labels->begin(), document.labels->end());
    manifest.add_document_lengths(static_cast<uint32_t>(document.token_ids->size()));
    manifest.add_samples(document.sample);
    for (const PicturePatches* picture : document.pictures) {
      microbatch.patches.insert(microbatch.patches.end(), picture->patches.begin(), picture->patches.end());
      common::v1::MediaGrid& grid = *manifest.add_grids();
      grid.set_frames(picture->frames);
      grid.set_rows(picture->rows);
      grid.set_columns(picture->columns);
      feature_rows += MediaPositions(picture->rows, picture->columns, merge);
    }
  }
  manifest.set_feature_rows(feature_rows);
  manifest.set_tokens(static_cast<uint32_t>(microbatch.token_ids.size()));
  const std::vector<uint32_t> lengths(manifest.document_lengths().begin(), manifest.document_lengths().end());
  manifest.set_trained_labels(CountTrainedLabels(microbatch.labels, lengths, ignore_index));
}

std::string StepDigest(const Step& step, const std::vector<std::string>& patches_digests) {
  std::string bytes;
  AppendNumber(step.microbatches.size(), bytes);
  for (size_t i = 0; i < step.microbatches.size(); ++i) {
    const data::v1::MicrobatchManifest& manifest = step.manifest.microbatches(static_cast<int>(i));
    AppendNumber(manifest.samples_size(), bytes);
    for (int d = 0; d < manifest.samples_size(); ++d) {
      AppendNumber(manifest.samples(d), bytes);
      AppendNumber(manifest.document_lengths(d), bytes);
    }
    AppendNumbers(step.microbatches[i].token_ids, bytes);
    AppendNumbers(step.microbatches[i].labels, bytes);
    AppendNumber(manifest.grids_size(), bytes);
    for (const common::v1::MediaGrid& grid : manifest.grids()) {
      for (const uint64_t side : {grid.frames(), grid.rows(), grid.columns()}) AppendNumber(side, bytes);
    }
    AppendNumber(patches_digests[i].size(), bytes);
    bytes += patches_digests[i];
  }
  return absl::HexStringToBytes(Sha256Hex(bytes));
}

}  // namespace moonpipe
