#include "moonpipe/data/byte_pair.h"

#include <limits>
#include <queue>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();

// A run of bytes of the piece in the chain of runs that are not merged yet.
struct Part {
  size_t end = 0;  // it begins at its own index
  size_t previous = 0;
  bool alive = true;
};

// Joining the part at `left` with its neighbour, which reaches to `end`.
struct Merge {
  int32_t rank;
  size_t left;
  size_t end;
  bool operator>(const Merge& other) const { return std::pair(rank, left) > std::pair(other.rank, other.left); }
};

}  // namespace

absl::Status BytePairRanks::Add(absl::string_view line) {
  const std::pair<absl::string_view, absl::string_view> fields = absl::StrSplit(line, absl::MaxSplits(' ', 1));
  std::string token;
  if (!absl::Base64Unescape(fields.first, &token) || token.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("\"", absl::CHexEscape(fields.first), "\" is not base64 of a token"));
  }
  int64_t rank = 0;
  if (!absl::SimpleAtoi(fields.second, &rank) || rank < 0 || rank >= kNoRank) {
    return absl::InvalidArgumentError(absl::StrCat("\"", absl::CHexEscape(fields.second), "\" is not a rank"));
  }
  if (!ranks_.emplace(token, static_cast<int32_t>(rank)).second) {
    return absl::InvalidArgumentError("the token was already given a rank on an earlier line");
  }
  return absl::OkStatus();
}

absl::StatusOr<BytePairRanks> BytePairRanks::Parse(absl::string_view lines) {
  BytePairRanks result;
  int64_t number = 0;
  for (absl::string_view line : absl::StrSplit(lines, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty()) continue;
    MOONPIPE_RETURN_IF_ERROR(Annotate(result.Add(line), absl::StrCat("line ", number)));
  }
  const size_t count = result.ranks_.size();
  result.tokens_.resize(count);
  for (const auto& [token, rank] : result.ranks_) {
    if (static_cast<size_t>(rank) >= count) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " in a file of ", count, " tokens: ranks must be 0 to ", count - 1));
    }
    if (!result.tokens_[rank].empty()) return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " is given to two tokens"));
    result.tokens_[rank] = token;
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (result.Rank(std::string(1, static_cast<char>(byte))) == kNoRank) {
      return absl::InvalidArgumentError(absl::StrCat("no token for the single byte ", byte, ": some texts could not be encoded"));
    }
  }
  return result;
}

int32_t BytePairRanks::Rank(absl::string_view bytes) const {
  const auto it = ranks_.find(bytes);
  return it == ranks_.end() ? kNoRank : it->second;
}

void BytePairRanks::Encode(absl::string_view piece, std::vector<int32_t>& ids) const {
  if (piece.empty()) return;
  if (const int32_t whole = Rank(piece); whole != kNoRank) {
    ids.push_back(whole);
    return;
  }
  const size_t size = piece.size();
  std::vector<Part> parts(size);
  std::priority_queue<Merge, std::vector<Merge>, std::greater<>> merges;
  const auto propose = [&](size_t left) {
    const size_t right = parts[left].end;
    if (right >= size) return;
    const size_t end = parts[right].end;
    const int32_t rank = Rank(piece.substr(left, end - left));
    if (rank != kNoRank) merges.push({rank, left, end});
  };
  for (size_t i = 0; i < size; ++i) parts[i] = {i + 1, i == 0 ? size : i - 1, true};
  for (size_t i = 0; i + 1 < size; ++i) propose(i);
  while (!merges.empty()) {
    const Merge merge = merges.top();
    merges.pop();
    // Entries are not removed when a neighbour changes; such an entry no longer describes two whole parts.
    const size_t right = parts[merge.left].end;
    if (!parts[merge.left].alive || right >= size || parts[right].end != merge.end) continue;
    parts[right].alive = false;
    parts[merge.left].end = merge.end;
    if (merge.end < size) parts[merge.end].previous = merge.left;
    propose(merge.left);
    if (parts[merge.left].previous < size) propose(parts[merge.left].previous);
  }
  for (size_t i = 0; i < size; i = parts[i].end) ids.push_back(Rank(piece.substr(i, parts[i].end - i)));
}

}  // namespace moonpipe
