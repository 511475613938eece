#include "moonpipe/config/spec_fields.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "moonpipe/base/nearest_name.h"

namespace moonpipe {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr int kDeepestMerge = 16;

// yaml-cpp tags a scalar that was written in quotes with "!".
bool IsQuoted(const YAML::Node& node) { return node.Tag() == "!"; }

std::string Describe(const YAML::Node& node) {
  switch (node.Type()) {
    case YAML::NodeType::Undefined:
    case YAML::NodeType::Null:
      return "nothing";
    case YAML::NodeType::Sequence:
      return absl::StrCat("a list of ", node.size());
    case YAML::NodeType::Map:
      return "a mapping";
    case YAML::NodeType::Scalar:
      break;
  }
  return IsQuoted(node) ? absl::StrCat("the quoted text \"", node.Scalar(), "\"")
                        : absl::StrCat("\"", node.Scalar(), "\"");
}

std::vector<std::string> FieldNames(const Descriptor* message) {
  std::vector<std::string> names;
  for (int i = 0; i < message->field_count(); ++i) names.push_back(message->field(i)->name());
  return names;
}

void FindField(const Descriptor* message, const std::string& path, const std::string& name,
               std::vector<std::string>* found) {
  for (int i = 0; i < message->field_count(); ++i) {
    const FieldDescriptor* field = message->field(i);
    const std::string field_path = JoinPath(path, field->name());
    if (field->name() == name) found->push_back(field_path);
    if (field->message_type() != nullptr) {
      FindField(field->message_type(), field->is_repeated() ? field_path + "[0]" : field_path, name, found);
    }
  }
}

// The key-value pairs of a mapping with `<<` merged in: an own key wins over a merged one, an earlier merge over a
// later one.
struct Entry {
  YAML::Node key;
  YAML::Node value;
};

void MergedEntries(const YAML::Node& node, int depth, SpecReader* reader, const std::string& path,
                   std::vector<Entry>* entries) {
  if (depth > kDeepestMerge) {
    reader->AddProblem(node, path, "merge keys (<<) are nested too deeply; does a mapping merge itself?");
    return;
  }
  std::map<std::string, YAML::Node> own;
  std::vector<YAML::Node> merges;
  for (const auto& pair : node) {
    if (!pair.first.IsScalar()) {
      reader->AddProblem(pair.first, path, absl::StrCat("a field name is expected, found ", Describe(pair.first)));
      continue;
    }
    const std::string& key = pair.first.Scalar();
    if (key == "<<" && !IsQuoted(pair.first)) {
      merges.push_back(pair.second);
      continue;
    }
    const auto [first, inserted] = own.emplace(key, pair.first);
    if (!inserted) {
      reader->AddProblem(pair.first, JoinPath(path, key),
                         absl::StrCat("is given twice, first in line ", first->second.Mark().line + 1, "; keep one"));
      continue;
    }
    const bool merged_before =
        std::any_of(entries->begin(), entries->end(), [&](const Entry& e) { return e.key.Scalar() == key; });
    if (!merged_before) entries->push_back({pair.first, pair.second});
  }
  for (const YAML::Node& merge : merges) {
    if (merge.IsMap()) {
      MergedEntries(merge, depth + 1, reader, path, entries);
    } else if (merge.IsSequence()) {
      for (const auto& one : merge) {
        if (one.IsMap()) {
          MergedEntries(one, depth + 1, reader, path, entries);
        } else {
          reader->AddProblem(one, path, absl::StrCat("<< merges mappings, found ", Describe(one)));
        }
      }
    } else {
      reader->AddProblem(merge, path,
                         absl::StrCat("<< merges a mapping or a list of mappings, found ", Describe(merge)));
    }
  }
}

std::string TypeName(const FieldDescriptor* field) {
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat("a whole number from 0 to ", std::numeric_limits<uint32_t>::max());
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat("a whole number from 0 to ", std::numeric_limits<uint64_t>::max());
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_INT64:
      return "a whole number";
    case FieldDescriptor::CPPTYPE_DOUBLE:
    case FieldDescriptor::CPPTYPE_FLOAT:
      return "a finite number";
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true or false";
    case FieldDescriptor::CPPTYPE_STRING:
      return "text";
    case FieldDescriptor::CPPTYPE_ENUM:
      return absl::StrCat("one of ", absl::StrJoin(EnumValueNames(field->enum_type()), ", "));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return absl::StrCat("a mapping with ", absl::StrJoin(FieldNames(field->message_type()), ", "));
  }
  return "";
}

// SimpleAtoi trims white space and takes a sign; YAML has trimmed already and a sign has no use.
bool IsDigits(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

template <typename Number>
std::optional<Number> ParseWhole(absl::string_view text) {
  Number number;
  const absl::string_view digits = std::is_signed_v<Number> ? absl::StripPrefix(text, "-") : text;
  if (!IsDigits(digits) || !absl::SimpleAtoi(text, &number)) return std::nullopt;
  return number;
}

std::optional<double> ParseDouble(absl::string_view text) {
  double number;
  if (!absl::SimpleAtod(text, &number) || !std::isfinite(number)) return std::nullopt;
  return number;
}

std::optional<bool> ParseBool(absl::string_view text) {
  const std::string lower = absl::AsciiStrToLower(text);
  if (lower == "true") return true;
  if (lower == "false") return false;
  return std::nullopt;
}

std::string EnumPrefix(const EnumDescriptor* type) {
  std::string prefix;
  for (const char c : type->name()) {
    if (absl::ascii_isupper(static_cast<unsigned char>(c)) && !prefix.empty()) prefix += '_';
    prefix += absl::ascii_toupper(static_cast<unsigned char>(c));
  }
  return prefix + "_";
}

const EnumValueDescriptor* FindEnumValue(const EnumDescriptor* type, absl::string_view text) {
  const std::string wanted = absl::StrReplaceAll(absl::AsciiStrToLower(text), {{"-", "_"}});
  for (int i = 0; i < type->value_count(); ++i) {
    const EnumValueDescriptor* value = type->value(i);
    if (value->number() == 0) continue;
    if (wanted == EnumValueName(value) || wanted == absl::AsciiStrToLower(value->name())) return value;
  }
  return nullptr;
}

template <typename Value, typename Set, typename Add>
bool Store(const FieldDescriptor* field, const std::optional<Value>& value, Set set, Add add) {
  if (!value.has_value()) return false;
  field->is_repeated() ? add(*value) : set(*value);
  return true;
}

// False when the text is not of the field's type.
bool StoreScalar(const FieldDescriptor* field, const YAML::Node& node, Message* message) {
  const Reflection* r = message->GetReflection();
  const std::string& text = node.Scalar();
  const bool is_text =
      field->cpp_type() == FieldDescriptor::CPPTYPE_STRING || field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM;
  if (IsQuoted(node) && !is_text) return false;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return Store(
          field, ParseWhole<uint32_t>(text), [&](uint32_t v) { r->SetUInt32(message, field, v); },
          [&](uint32_t v) { r->AddUInt32(message, field, v); });
    case FieldDescriptor::CPPTYPE_UINT64:
      return Store(
          field, ParseWhole<uint64_t>(text), [&](uint64_t v) { r->SetUInt64(message, field, v); },
          [&](uint64_t v) { r->AddUInt64(message, field, v); });
    case FieldDescriptor::CPPTYPE_INT32:
      return Store(
          field, ParseWhole<int32_t>(text), [&](int32_t v) { r->SetInt32(message, field, v); },
          [&](int32_t v) { r->AddInt32(message, field, v); });
    case FieldDescriptor::CPPTYPE_INT64:
      return Store(
          field, ParseWhole<int64_t>(text), [&](int64_t v) { r->SetInt64(message, field, v); },
          [&](int64_t v) { r->AddInt64(message, field, v); });
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return Store(
          field, ParseDouble(text), [&](double v) { r->SetDouble(message, field, v); },
          [&](double v) { r->AddDouble(message, field, v); });
    case FieldDescriptor::CPPTYPE_FLOAT:
      return Store(
          field, ParseDouble(text), [&](double v) { r->SetFloat(message, field, static_cast<float>(v)); },
          [&](double v) { r->AddFloat(message, field, static_cast<float>(v)); });
    case FieldDescriptor::CPPTYPE_BOOL:
      return Store(
          field, ParseBool(text), [&](bool v) { r->SetBool(message, field, v); },
          [&](bool v) { r->AddBool(message, field, v); });
    case FieldDescriptor::CPPTYPE_STRING:
      field->is_repeated() ? r->AddString(message, field, text) : r->SetString(message, field, text);
      return true;
    case FieldDescriptor::CPPTYPE_ENUM: {
      const EnumValueDescriptor* value = FindEnumValue(field->enum_type(), text);
      if (value == nullptr) return false;
      field->is_repeated() ? r->AddEnum(message, field, value) : r->SetEnum(message, field, value);
      return true;
    }
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return false;
  }
  return false;
}

}  // namespace

void SpecReader::ReadMessage(const YAML::Node& node, const std::string& path, Message* message) {
  if (!node.IsDefined() || node.IsNull()) return;
  const Descriptor* descriptor = message->GetDescriptor();
  if (!node.IsMap()) {
    AddProblem(node, path,
               absl::StrCat("expected a mapping with ", absl::StrJoin(FieldNames(descriptor), ", "), "; found ",
                            Describe(node)));
    return;
  }
  std::vector<Entry> entries;
  MergedEntries(node, 0, this, path, &entries);
  for (const Entry& entry : entries) {
    const std::string& name = entry.key.Scalar();
    const std::string field_path = JoinPath(path, name);
    const FieldDescriptor* field = descriptor->FindFieldByName(name);
    if (field == nullptr) {
      std::string suggestion;
      AddProblem(entry.key, field_path, UnknownFieldDescription(descriptor, path, name, &suggestion));
      if (!suggestion.empty()) meant_.push_back(suggestion);
      continue;
    }
    locations_.emplace_back(field_path, Location(entry.key));
    ReadField(entry.value, field_path, field, message);
  }
}

void SpecReader::ReadField(const YAML::Node& node, const std::string& path, const FieldDescriptor* field,
                           Message* message) {
  const Reflection* reflection = message->GetReflection();
  if (!field->is_repeated()) {
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      ReadMessage(node, path, reflection->MutableMessage(message, field));
    } else {
      ReadScalar(node, path, field, message);
    }
    return;
  }
  reflection->ClearField(message, field);
  if (!node.IsDefined() || node.IsNull()) return;
  const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
  if (!node.IsSequence()) {
    // A list of one may be written without its brackets.
    if (is_message && node.IsMap()) {
      ReadMessage(node, path + "[0]", reflection->AddMessage(message, field));
    } else if (!is_message && node.IsScalar()) {
      ReadScalar(node, path, field, message);
    } else {
      AddProblem(node, path, absl::StrCat("expected a list, each ", TypeName(field), "; found ", Describe(node)));
    }
    return;
  }
  int index = 0;
  for (const auto& element : node) {
    const std::string element_path = absl::StrCat(path, "[", index++, "]");
    locations_.emplace_back(element_path, Location(element));
    if (is_message) {
      ReadMessage(element, element_path, reflection->AddMessage(message, field));
    } else {
      ReadScalar(element, element_path, field, message);
    }
  }
}

void SpecReader::ReadScalar(const YAML::Node& node, const std::string& path, const FieldDescriptor* field,
                            Message* message) {
  if (node.IsDefined() && node.IsScalar() && StoreScalar(field, node, message)) return;
  std::string description = absl::StrCat("expected ", TypeName(field), "; found ", Describe(node));
  if (!node.IsDefined() || node.IsNull()) {
    absl::StrAppend(&description, "; leave the field out to take its default");
  } else if (node.IsScalar() && field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM) {
    const auto near = NearestNames(absl::AsciiStrToLower(node.Scalar()), EnumValueNames(field->enum_type()));
    if (!near.empty()) absl::StrAppend(&description, "; did you mean ", near[0], "?");
  }
  AddProblem(node, path, std::move(description));
}

void SpecReader::AddProblem(const YAML::Node& node, const std::string& path, std::string description) {
  problems_.push_back({Location(node), path, std::move(description)});
}

std::string SpecReader::Location(const YAML::Node& node) const {
  const YAML::Mark mark = node.IsDefined() ? node.Mark() : YAML::Mark::null_mark();
  if (!with_position_ || mark.is_null()) return source_;
  return absl::StrCat(source_, ":", mark.line + 1, ":", mark.column + 1);
}

std::string UnknownFieldDescription(const Descriptor* message, const std::string& path, const std::string& name,
                                    std::string* suggestion) {
  std::vector<std::string> elsewhere;
  const Descriptor* root = message->file()->FindMessageTypeByName("TrainingRunSpec");
  if (root != nullptr) FindField(root, "", name, &elsewhere);
  if (elsewhere.size() == 1) {
    *suggestion = elsewhere[0];
    return absl::StrCat("no such field; did you mean ", elsewhere[0], "?");
  }
  const auto near = NearestNames(name, FieldNames(message));
  if (!near.empty()) {
    *suggestion = JoinPath(path, near[0]);
    return absl::StrCat("no such field; did you mean ", near[0], "?");
  }
  return absl::StrCat("no such field; known are ", absl::StrJoin(FieldNames(message), ", "));
}

std::string EnumValueName(const EnumValueDescriptor* value) {
  return absl::AsciiStrToLower(absl::StripPrefix(value->name(), EnumPrefix(value->type())));
}

std::vector<std::string> EnumValueNames(const EnumDescriptor* type) {
  std::vector<std::string> names;
  for (int i = 0; i < type->value_count(); ++i) {
    if (type->value(i)->number() != 0) names.push_back(EnumValueName(type->value(i)));
  }
  return names;
}

std::string JoinPath(const std::string& path, absl::string_view name) {
  return path.empty() ? std::string(name) : absl::StrCat(path, ".", name);
}

}  // namespace moonpipe
