#include "moonpipe/data/utf8.h"

#include <unicode/unistr.h>

namespace moonpipe {

std::string ReplaceInvalidUtf8(absl::string_view bytes) {
  std::string text;
  icu::UnicodeString::fromUTF8(icu::StringPiece(bytes.data(), static_cast<int32_t>(bytes.size()))).toUTF8String(text);
  return text;
}

}  // namespace moonpipe
