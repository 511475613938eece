// Conversations to token ids. The turn format of Kimi-VL and Moonlight:
//
//   <|im_user|>user<|im_middle|>TEXT<|im_end|><|im_assistant|>assistant<|im_middle|>TEXT<|im_end|>
//
// A picture of n positions (Kimi-VL only) is <|media_start|>image<|media_content|>, n times <|media_pad|>, <|media_end|>. Special
// tokens are put in by id and every stretch of text between them is encoded on its own, so no text can spell one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "moonpipe/data/record.h"
#include "moonpipe/data/tokenizer.h"

namespace moonpipe {

struct TokenSequence {
  std::vector<int32_t> ids;
  std::vector<bool> trained;  // of equal length, not shifted: content and <|im_end|> of assistant turns, without their pictures
};

class ChatTemplate {
 public:
  // `name`: kimi-vl or moonlight. `tokenizer` must outlive the template. `default_system`, if not empty, is put before
  // conversations that do not begin with a system turn. INVALID_ARGUMENT for an unknown name or a tokenizer that lacks a special
  // token of the format.
  static absl::StatusOr<ChatTemplate> Make(absl::string_view name, const Tokenizer* tokenizer, absl::string_view default_system = "");

  // The whole conversation. `positions` holds the media positions of each of record.pictures. Fails with a SkipError
  // (bad_record): a role other than system, user and assistant, or a picture in a format that has none.
  absl::StatusOr<TokenSequence> Render(const Record& record, absl::Span<const uint32_t> positions) const;

  // The turns before the last, and the last one's header: what a model continues with the answer. The last turn must be the
  // assistant's, without a picture, else a SkipError (bad_record).
  absl::StatusOr<TokenSequence> RenderPrompt(const Record& record, absl::Span<const uint32_t> positions) const;

  // What RenderPrompt leaves out: the tokens of the last turn's text with the closing <|im_end|>.
  std::vector<int32_t> RenderAnswer(const Record& record) const;

  // <|media_pad|>, or -1 in a format without pictures.
  int32_t media_pad() const { return media_pad_; }
  int32_t end_of_turn() const { return end_; }

 private:
  ChatTemplate() = default;
  absl::Status AppendHeader(absl::string_view role, TokenSequence& out) const;
  absl::Status AppendTurn(const Turn& turn, absl::Span<const uint32_t> positions, TokenSequence& out) const;
  absl::Status AppendDefaultSystem(const Record& record, TokenSequence& out) const;
  void AppendText(absl::string_view text, bool trained, TokenSequence& out) const;

  const Tokenizer* tokenizer_ = nullptr;
  std::string default_system_;
  int32_t user_ = -1, assistant_ = -1, system_ = -1, middle_ = -1, end_ = -1;
  int32_t media_start_ = -1, media_content_ = -1, media_pad_ = -1, media_end_ = -1;
};

}  // namespace moonpipe
