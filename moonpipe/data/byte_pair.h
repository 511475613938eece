// Byte-pair encoding by rank: the pair of neighbours whose joined bytes have the lowest rank is merged first, the leftmost of
// equals, until no neighbours join to a known token. n log n in the length of the piece.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moonpipe {

class BytePairRanks {
 public:
  // Reads the lines of a tiktoken.model: base64 of the token, a space, its rank. Ranks must be 0 to n-1, each once, and every
  // single byte must be a token, so that any text can be encoded. INVALID_ARGUMENT names the line.
  static absl::StatusOr<BytePairRanks> Parse(absl::string_view lines);

  BytePairRanks(BytePairRanks&&) = default;
  BytePairRanks& operator=(BytePairRanks&&) = default;

  // Appends the tokens of one piece of text.
  void Encode(absl::string_view piece, std::vector<int32_t>& ids) const;

  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }
  // Bytes of the token; `rank` in [0, size()).
  const std::string& Bytes(int32_t rank) const { return tokens_[rank]; }

 private:
  BytePairRanks() = default;
  absl::Status Add(absl::string_view line);
  int32_t Rank(absl::string_view bytes) const;

  std::vector<std::string> tokens_;  // by rank
  absl::flat_hash_map<std::string, int32_t> ranks_;
};

}  // namespace moonpipe
