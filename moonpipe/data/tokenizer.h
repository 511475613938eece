// The tiktoken tokenizer of the Kimi models: text is split by a pattern (Han runs, words with their English contraction, up to
// three digits, punctuation, white space), and each piece is byte-pair encoded. Text never yields a special token: a reserved
// name that is spelled out in it is text. Special tokens are looked up by name and put in by whoever builds the sequence.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "moonpipe/data/byte_pair.h"

namespace moonpipe {

// Safe to use from several threads.
class Tokenizer {
 public:
  // Reads FOLDER/tiktoken.model and the added_tokens_decoder of FOLDER/tokenizer_config.json. NOT_FOUND for a missing file;
  // INVALID_ARGUMENT with file and line for a malformed one.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& folder);
  ~Tokenizer();

  // Bytes that are not UTF-8 are replaced by U+FFFD first. As in the published tokenizers, a text is encoded in slices of
  // 400,000 characters, and runs of more than 25,000 characters without (or of nothing but) white space are cut.
  std::vector<int32_t> Encode(absl::string_view text) const;

  // Special tokens appear by name. Bytes that are not UTF-8, and ids without a token, become U+FFFD.
  std::string Decode(absl::Span<const int32_t> ids) const;

  // NOT_FOUND names the folder's special tokens that come nearest.
  absl::StatusOr<int32_t> SpecialTokenId(absl::string_view name) const;

  int32_t max_id() const { return max_id_; }

 private:
  class Splitter;
  Tokenizer(BytePairRanks ranks, absl::flat_hash_map<std::string, int32_t> special, std::unique_ptr<Splitter> splitter);

  BytePairRanks ranks_;
  absl::flat_hash_map<std::string, int32_t> special_ids_;
  absl::flat_hash_map<int32_t, std::string> special_names_;
  std::unique_ptr<Splitter> splitter_;
  int32_t max_id_;
};

}  // namespace moonpipe
