// Documents laid end to end into microbatches with their manifest. There is no padding.
#pragma once

#include <cstdint>
#include <vector>

#include "moonpipe/data/image_processor.h"
#include "moonpipe/data/step_source.h"

namespace moonpipe {

// One sample's part of a microbatch. What it points to must outlive the call that takes it.
struct Document {
  uint64_t sample = 0;
  const std::vector<int32_t>* token_ids = nullptr;
  const std::vector<int32_t>* labels = nullptr;  // of equal length
  std::vector<const PicturePatches*> pictures;   // in the order of their positions
};

// Appends a microbatch and its manifest to `step`. `ignore_index` marks labels that are not trained.
void AppendMicrobatch(const std::vector<Document>& documents, int32_t merge, int64_t ignore_index, Step& step);

// SHA-256 (32 bytes) over what decides the result of a step: of each microbatch its samples, document lengths, token ids, labels,
// grids and the digest of its patches, little-endian and with counts, so that no two steps have the same bytes.
// `patches_digests` holds one string a microbatch.
std::string StepDigest(const Step& step, const std::vector<std::string>& patches_digests);

}  // namespace moonpipe
