// One conversation as it stands in a KEY.json:
//
//   {"messages": [{"role": "user", "content": "<image>Which digit is this?"}, {"role": "assistant", "content": "seven"}],
//    "images": ["000007.0.png"]}
//
// Each `<image>` tag of a content string is the place of the next picture of "images". A content may also be a list of parts:
// {"type": "text", "text": ...}, {"type": "image"} for the next of "images", or {"type": "image_url", "image_url": {"url": ...}}
// (also {"type": "image", "image": ...}) for a picture of its own; a tag inside a text part is text.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moonpipe {

// A stretch of text or the place of a picture.
struct ContentPart {
  bool is_picture = false;
  std::string text;    // of a text part
  size_t picture = 0;  // of a picture part: its index in Record::pictures
};

struct Turn {
  std::string role;
  std::vector<ContentPart> parts;  // no two text parts in a row
};

struct Record {
  std::vector<Turn> turns;            // at least one
  std::vector<std::string> pictures;  // names or data URIs, in reading order of their places
};

// Fails with a SkipError (bad_json or bad_record).
absl::StatusOr<Record> ParseRecord(absl::string_view json);

}  // namespace moonpipe
