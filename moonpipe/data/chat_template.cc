#include "moonpipe/data/chat_template.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/skip.h"

namespace moonpipe {
namespace {

void AppendToken(int32_t id, size_t count, bool trained, TokenSequence& out) {
  out.ids.insert(out.ids.end(), count, id);
  out.trained.insert(out.trained.end(), count, trained);
}

}  // namespace

absl::StatusOr<ChatTemplate> ChatTemplate::Make(absl::string_view name, const Tokenizer* tokenizer, absl::string_view default_system) {
  if (name != "kimi-vl" && name != "moonlight") {
    return absl::InvalidArgumentError(absl::StrCat("chat template \"", name, "\" is not known; use kimi-vl or moonlight"));
  }
  ChatTemplate result;
  result.tokenizer_ = tokenizer;
  result.default_system_ = std::string(default_system);
  std::vector<std::pair<const char*, int32_t*>> tokens = {{"<|im_user|>", &result.user_},
                                                          {"<|im_assistant|>", &result.assistant_},
                                                          {"<|im_system|>", &result.system_},
                                                          {"<|im_middle|>", &result.middle_},
                                                          {"<|im_end|>", &result.end_}};
  if (name == "kimi-vl") {
    tokens.insert(tokens.end(), {{"<|media_start|>", &result.media_start_},
                                 {"<|media_content|>", &result.media_content_},
                                 {"<|media_pad|>", &result.media_pad_},
                                 {"<|media_end|>", &result.media_end_}});
  }
  for (const auto& [token, id] : tokens) {
    const absl::StatusOr<int32_t> found = tokenizer->SpecialTokenId(token);
    if (!found.ok()) return absl::InvalidArgumentError(absl::StrCat("chat template ", name, ": ", found.status().message()));
    *id = *found;
  }
  return result;
}

void ChatTemplate::AppendText(absl::string_view text, bool trained, TokenSequence& out) const {
  const std::vector<int32_t> ids = tokenizer_->Encode(text);
  out.ids.insert(out.ids.end(), ids.begin(), ids.end());
  out.trained.insert(out.trained.end(), ids.size(), trained);
}

absl::Status ChatTemplate::AppendHeader(absl::string_view role, TokenSequence& out) const {
  const int32_t opening = role == "user" ? user_ : role == "assistant" ? assistant_ : role == "system" ? system_ : -1;
  if (opening < 0) return SkipError(kBadRecord, absl::StrCat("role \"", role, "\" is none of system, user and assistant"));
  AppendToken(opening, 1, false, out);
  AppendText(role, false, out);
  AppendToken(middle_, 1, false, out);
  return absl::OkStatus();
}

absl::Status ChatTemplate::AppendTurn(const Turn& turn, absl::Span<const uint32_t> positions, TokenSequence& out) const {
  MOONPIPE_RETURN_IF_ERROR(AppendHeader(turn.role, out));
  const bool trained = turn.role == "assistant";
  for (const ContentPart& part : turn.parts) {
    if (!part.is_picture) {
      AppendText(part.text, trained, out);
      continue;
    }
    if (media_pad_ < 0) return SkipError(kBadRecord, "the chat template has no pictures, and the record has one");
    AppendToken(media_start_, 1, false, out);
    AppendText("image", false, out);
    AppendToken(media_content_, 1, false, out);
    AppendToken(media_pad_, positions[part.picture], false, out);
    AppendToken(media_end_, 1, false, out);
  }
  AppendToken(end_, 1, trained, out);
  return absl::OkStatus();
}

absl::Status ChatTemplate::AppendDefaultSystem(const Record& record, TokenSequence& out) const {
  if (default_system_.empty() || record.turns.front().role == "system") return absl::OkStatus();
  return AppendTurn({"system", {{false, default_system_, 0}}}, {}, out);
}

absl::StatusOr<TokenSequence> ChatTemplate::Render(const Record& record, absl::Span<const uint32_t> positions) const {
  TokenSequence out;
  MOONPIPE_RETURN_IF_ERROR(AppendDefaultSystem(record, out));
  for (const Turn& turn : record.turns) MOONPIPE_RETURN_IF_ERROR(AppendTurn(turn, positions, out));
  return out;
}

absl::StatusOr<TokenSequence> ChatTemplate::RenderPrompt(const Record& record, absl::Span<const uint32_t> positions) const {
  const Turn& last = record.turns.back();
  if (last.role != "assistant") return SkipError(kBadRecord, "the last turn is not the assistant's: there is no answer to decode");
  for (const ContentPart& part : last.parts) {
    if (part.is_picture) return SkipError(kBadRecord, "the answer to decode holds a picture");
  }
  TokenSequence out;
  MOONPIPE_RETURN_IF_ERROR(AppendDefaultSystem(record, out));
  for (size_t i = 0; i + 1 < record.turns.size(); ++i) MOONPIPE_RETURN_IF_ERROR(AppendTurn(record.turns[i], positions, out));
  MOONPIPE_RETURN_IF_ERROR(AppendHeader(last.role, out));
  return out;
}

std::vector<int32_t> ChatTemplate::RenderAnswer(const Record& record) const {
  std::vector<int32_t> ids;
  for (const ContentPart& part : record.turns.back().parts) {
    const std::vector<int32_t> text = tokenizer_->Encode(part.text);
    ids.insert(ids.end(), text.begin(), text.end());
  }
  ids.push_back(end_);
  return ids;
}

}  // namespace moonpipe
