// Training steps out of files: samples in the order of a keyed permutation, packed into microbatches of whole documents.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "moonpipe/data/picture_rule.h"
#include "moonpipe/data/picture_warp.h"
#include "moonpipe/data/v1/manifest.pb.h"

namespace moonpipe {

// The tensors of one microbatch, ready to be served.
struct Microbatch {
  std::vector<int32_t> token_ids;  // [tokens]; empty where it starts from embeddings
  std::vector<int32_t> labels;     // [tokens], not shifted: entry i is token i, or the model's ignore_index where it is not trained
  std::vector<uint8_t> patches;    // bytes of [patches, 3, 14, 14] of all pictures in reading order, in the manifest's pixel_type
  std::vector<float> embeddings;   // [tokens, hidden] where the manifest has_embeddings
};

struct Step {
  data::v1::StepManifest manifest;
  std::vector<Microbatch> microbatches;
};

struct StepSourceOptions {
  std::vector<std::string> files;  // patterns are expanded
  std::string tokenizer_folder;
  std::string chat_template = "kimi-vl";
  int64_t vocab_size = 0;                  // of the model: a tokenizer with larger ids is refused
  int64_t media_placeholder_token_id = 0;  // of the model: must be the tokenizer's <|media_pad|>
  int64_t ignore_index = -100;             // of the model: the label of tokens that are not trained
  int32_t microbatches = 1;
  int32_t microbatch_tokens = 0;
  int32_t packing_window = 256;
  PictureRule pictures;  // a rule without a limit: no sample may have a picture
  uint64_t seed = 0;
  bool allow_outside_paths = false;
  WarpLimits random_warp;  // training pictures only
};

// Makes steps one after another. Deterministic: equal options and an equal cursor give equal bytes, in any process. Not safe for
// use from two threads.
class StepSource {
 public:
  virtual ~StepSource() = default;
  // The step that begins at `cursor`; its manifest holds the next cursor. INVALID_ARGUMENT when the data set has no usable sample.
  virtual absl::StatusOr<Step> Make(uint64_t step, const data::v1::DataCursor& cursor) = 0;
  // Samples of an epoch.
  virtual uint64_t size() const = 0;
};

// Opens and indexes the files. NOT_FOUND for a pattern without files; INVALID_ARGUMENT where tokenizer and model disagree.
absl::StatusOr<std::unique_ptr<StepSource>> OpenStepSource(const StepSourceOptions& options);

// Held-out samples for greedy decoding.
class DecodeSource {
 public:
  virtual ~DecodeSource() = default;
  virtual size_t size() const = 0;
  // Reference answers, one a sample: tokens with the closing <|im_end|>, and text without it.
  virtual const std::vector<std::vector<int32_t>>& references() const = 0;
  virtual const std::vector<std::string>& reference_texts() const = 0;
  virtual std::string Text(const std::vector<int32_t>& answer) const = 0;
  virtual int32_t end_token() const = 0;
  // One microbatch group with every open sample's prompt followed by its answer so far. `answers` and `done` hold one entry a
  // sample. The manifest's `samples` tell which sample a document is. As many microbatches as the token limit makes necessary.
  virtual absl::StatusOr<Step> Make(const std::vector<std::vector<int32_t>>& answers, const std::vector<bool>& done,
                                    bool swap_pictures) = 0;
};
absl::StatusOr<std::unique_ptr<DecodeSource>> OpenDecodeSource(const StepSourceOptions& options);

}  // namespace moonpipe
