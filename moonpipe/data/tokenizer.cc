#include "moonpipe/data/tokenizer.h"

#include <unicode/regex.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/nearest_name.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/utf8.h"

namespace moonpipe {
namespace {

constexpr char kReplacement[] = "\xEF\xBF\xBD";
constexpr int32_t kSliceCharacters = 400000;
constexpr int32_t kRunCharacters = 25000;

// Upper-case-like and lower-case-like letters and marks, without Han: the first branch has taken those.
#define MOONPIPE_UPPER R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]])"
#define MOONPIPE_LOWER R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]])"
#define MOONPIPE_CONTRACTION R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
constexpr char kPattern[] =
    R"(\p{Han}+)"
    R"(|[^\r\n\p{L}\p{N}]?)" MOONPIPE_UPPER "*" MOONPIPE_LOWER "+" MOONPIPE_CONTRACTION
    R"(|[^\r\n\p{L}\p{N}]?)" MOONPIPE_UPPER "+" MOONPIPE_LOWER "*" MOONPIPE_CONTRACTION
    R"(|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+)"
    R"(|\s+(?!\S))"
    R"(|\s+)";
#undef MOONPIPE_UPPER
#undef MOONPIPE_LOWER
#undef MOONPIPE_CONTRACTION

// What Python's str.isspace says, by which the published tokenizers cut long runs.
bool IsSpace(UChar32 character) { return u_isUWhiteSpace(character) || (character >= 0x1c && character <= 0x1f); }

// Calls `take` with the slices of `text` that are encoded on their own.
template <typename Take>
void ForEachSlice(const icu::UnicodeString& text, Take take) {
  int32_t start = 0, characters = 0, run = 0;
  bool run_is_space = false;
  for (int32_t i = 0; i < text.length(); i = text.moveIndex32(i, 1)) {
    const bool space = IsSpace(text.char32At(i));
    run = characters > 0 && space == run_is_space ? run + 1 : 1;
    run_is_space = space;
    // Characters count from the start of the last full slice, also past a cut run.
    if (characters == kSliceCharacters || run > kRunCharacters) {
      take(text.tempSubStringBetween(start, i));
      start = i;
      run = 1;
      if (characters == kSliceCharacters) characters = 0;
    }
    ++characters;
  }
  take(text.tempSubStringBetween(start));
}

std::string ToUtf8(const icu::UnicodeString& text) {
  std::string bytes;
  text.toUTF8String(bytes);
  return bytes;
}

icu::UnicodeString FromUtf8(absl::string_view bytes) {
  return icu::UnicodeString::fromUTF8(icu::StringPiece(bytes.data(), static_cast<int32_t>(bytes.size())));
}

absl::StatusOr<absl::flat_hash_map<std::string, int32_t>> ParseSpecialTokens(const std::string& text, int32_t ranks) {
  nlohmann::json config;
  try {
    config = nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
  const auto added = config.find("added_tokens_decoder");
  if (!config.is_object() || added == config.end() || !added->is_object()) {
    return absl::InvalidArgumentError("no object added_tokens_decoder, which names the special tokens");
  }
  absl::flat_hash_map<std::string, int32_t> special;
  for (const auto& [key, entry] : added->items()) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(key, &id) || id < 0) return absl::InvalidArgumentError(absl::StrCat("added_tokens_decoder: \"", key, "\" is not an id"));
    if (id < ranks) {
      return absl::InvalidArgumentError(absl::StrCat("added_tokens_decoder: id ", id, " is a rank of tiktoken.model, which has ", ranks));
    }
    const auto content = entry.is_object() ? entry.find("content") : entry.end();
    if (!entry.is_object() || content == entry.end() || !content->is_string()) {
      return absl::InvalidArgumentError(absl::StrCat("added_tokens_decoder: id ", id, " has no string \"content\""));
    }
    if (!special.emplace(content->get<std::string>(), id).second) {
      return absl::InvalidArgumentError(absl::StrCat("added_tokens_decoder: ", content->get<std::string>(), " has two ids"));
    }
  }
  return special;
}

}  // namespace

// The compiled pattern, which threads may share; each text has a matcher of its own.
class Tokenizer::Splitter {
 public:
  static absl::StatusOr<std::unique_ptr<Splitter>> Make() {
    UErrorCode code = U_ZERO_ERROR;
    UParseError where;
    std::unique_ptr<icu::RegexPattern> pattern(
        icu::RegexPattern::compile(icu::UnicodeString::fromUTF8(kPattern), where, code));
    if (U_FAILURE(code)) return absl::InternalError(absl::StrCat("split pattern, offset ", where.offset, ": ", u_errorName(code)));
    auto splitter = std::make_unique<Splitter>();
    splitter->pattern_ = std::move(pattern);
    return splitter;
  }

  template <typename Take>
  void ForEachPiece(const icu::UnicodeString& text, Take take) const {
    UErrorCode code = U_ZERO_ERROR;
    std::unique_ptr<icu::RegexMatcher> matcher(pattern_->matcher(text, code));
    int32_t done = 0;
    while (U_SUCCESS(code) && matcher->find(code)) {
      const int32_t end = matcher->end(code);
      take(text.tempSubStringBetween(done, end));
      done = end;
    }
    // The branches cover every character; this holds the text together should the engine give up on a monstrous one.
    if (done < text.length()) take(text.tempSubStringBetween(done));
  }

 private:
  std::unique_ptr<icu::RegexPattern> pattern_;
};

Tokenizer::Tokenizer(BytePairRanks ranks, absl::flat_hash_map<std::string, int32_t> special, std::unique_ptr<Splitter> splitter)
    : ranks_(std::move(ranks)), special_ids_(std::move(special)), splitter_(std::move(splitter)), max_id_(ranks_.size() - 1) {
  for (const auto& [name, id] : special_ids_) {
    special_names_[id] = name;
    max_id_ = std::max(max_id_, id);
  }
}

Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& folder) {
  const std::string model_path = absl::StrCat(folder, "/tiktoken.model");
  const std::string config_path = absl::StrCat(folder, "/tokenizer_config.json");
  MOONPIPE_ASSIGN_OR_RETURN(const std::string model, ReadFile(model_path));
  MOONPIPE_ASSIGN_OR_RETURN(const std::string config, ReadFile(config_path));
  absl::StatusOr<BytePairRanks> ranks = BytePairRanks::Parse(model);
  if (!ranks.ok()) return Annotate(ranks.status(), model_path);
  auto special = ParseSpecialTokens(config, ranks->size());
  if (!special.ok()) return Annotate(special.status(), config_path);
  MOONPIPE_ASSIGN_OR_RETURN(std::unique_ptr<Splitter> splitter, Splitter::Make());
  return std::unique_ptr<Tokenizer>(new Tokenizer(*std::move(ranks), *std::move(special), std::move(splitter)));
}

std::vector<int32_t> Tokenizer::Encode(absl::string_view text) const {
  std::vector<int32_t> ids;
  ForEachSlice(FromUtf8(text), [&](const icu::UnicodeString& slice) {
    splitter_->ForEachPiece(slice, [&](const icu::UnicodeString& piece) { ranks_.Encode(ToUtf8(piece), ids); });
  });
  return ids;
}

std::string Tokenizer::Decode(absl::Span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (id >= 0 && id < ranks_.size()) {
      bytes += ranks_.Bytes(id);
    } else if (const auto special = special_names_.find(id); special != special_names_.end()) {
      bytes += special->second;
    } else {
      bytes += kReplacement;
    }
  }
  return ReplaceInvalidUtf8(bytes);
}

absl::StatusOr<int32_t> Tokenizer::SpecialTokenId(absl::string_view name) const {
  const auto it = special_ids_.find(name);
  if (it != special_ids_.end()) return it->second;
  std::vector<std::string> known;
  for (const auto& entry : special_ids_) known.push_back(entry.first);
  std::sort(known.begin(), known.end());
  return absl::NotFoundError(absl::StrCat("the tokenizer has no special token ", name, "; nearest: ",
                                          absl::StrJoin(NearestNames(name, known, 3), ", ")));
}

}  // namespace moonpipe
