#include <algorithm>
#include <charconv>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/config/spec_fields.h"

namespace moonpipe {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Text that YAML reads back as the same text without quotes: a letter, `/`, `.` or `_` first and nothing that means
// something.
bool IsPlain(absl::string_view text) {
  if (text.empty()) return false;
  const auto is_word = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '/' || c == '.' || c == '_';
  };
  if (!is_word(text[0])) return false;
  if (!std::all_of(text.begin(), text.end(), [&](char c) { return is_word(c) || c == '-' || c == '*' || c == '?'; }))
    return false;
  return !absl::EqualsIgnoreCase(text, "null");
}

std::string Quote(absl::string_view text) {
  if (IsPlain(text)) return std::string(text);
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      absl::StrAppend(&quoted, absl::StrFormat("\\x%02x", static_cast<unsigned char>(c)));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

// The shortest text that reads back as the same number.
std::string FormatDouble(double value) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, end.ptr);
}

// `index` of a repeated field, -1 for a singular one.
std::string FormatScalar(const Message& message, const FieldDescriptor* field, int index) {
  const Reflection* r = message.GetReflection();
  const bool one = index < 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(one ? r->GetUInt32(message, field) : r->GetRepeatedUInt32(message, field, index));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(one ? r->GetUInt64(message, field) : r->GetRepeatedUInt64(message, field, index));
    case FieldDescriptor::CPPTYPE_INT32:
      return absl::StrCat(one ? r->GetInt32(message, field) : r->GetRepeatedInt32(message, field, index));
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::StrCat(one ? r->GetInt64(message, field) : r->GetRepeatedInt64(message, field, index));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return FormatDouble(one ? r->GetDouble(message, field) : r->GetRepeatedDouble(message, field, index));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return FormatDouble(one ? r->GetFloat(message, field) : r->GetRepeatedFloat(message, field, index));
    case FieldDescriptor::CPPTYPE_BOOL:
      return (one ? r->GetBool(message, field) : r->GetRepeatedBool(message, field, index)) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_STRING:
      return Quote(one ? r->GetString(message, field) : r->GetRepeatedString(message, field, index));
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumValueName(one ? r->GetEnum(message, field) : r->GetRepeatedEnum(message, field, index));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      break;
  }
  return "";
}

// The lines of a message's fields at an indentation; no lines for an empty message.
void WriteFields(const Message& message, int indent, std::string* out) {
  const std::string space(indent, ' ');
  const Reflection* r = message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (!field->is_repeated()) {
      if (!r->HasField(message, field)) continue;
      if (!is_message) {
        absl::StrAppend(out, space, field->name(), ": ", FormatScalar(message, field, -1), "\n");
        continue;
      }
      std::string inner;
      WriteFields(r->GetMessage(message, field), indent + 2, &inner);
      absl::StrAppend(out, space, field->name(), inner.empty() ? ": {}\n" : ":\n", inner);
      continue;
    }
    const int size = r->FieldSize(message, field);
    if (size == 0) continue;
    if (!is_message) {
      std::vector<std::string> values;
      for (int k = 0; k < size; ++k) values.push_back(FormatScalar(message, field, k));
      const bool numbers = field->cpp_type() != FieldDescriptor::CPPTYPE_STRING;
      if (numbers) {
        absl::StrAppend(out, space, field->name(), ": [", absl::StrJoin(values, ", "), "]\n");
      } else {
        absl::StrAppend(out, space, field->name(), ":\n");
        for (const std::string& value : values) absl::StrAppend(out, space, "  - ", value, "\n");
      }
      continue;
    }
    absl::StrAppend(out, space, field->name(), ":\n");
    for (int k = 0; k < size; ++k) {
      std::string inner;
      WriteFields(r->GetRepeatedMessage(message, field, k), indent + 4, &inner);
      // The dash takes the place of the first line's indentation.
      absl::StrAppend(out, space, "  - ", inner.empty() ? "{}\n" : inner.substr(indent + 4));
    }
  }
}

}  // namespace

std::string WriteYaml(const cluster::v1::TrainingRunSpec& spec) {
  std::string out;
  WriteFields(spec, 0, &out);
  return out;
}

}  // namespace moonpipe
