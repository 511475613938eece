#include "moonpipe/config/overrides.h"

#include <cctype>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace moonpipe {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

struct PathPart {
  std::string name;
  std::optional<int> index;
};

// `groups[0]` -> {groups, 0}. Nothing when it is neither a name nor a name with an index.
std::optional<PathPart> ParsePathPart(absl::string_view text) {
  PathPart part;
  const size_t bracket = text.find('[');
  if (bracket != absl::string_view::npos) {
    if (text.back() != ']') return std::nullopt;
    const absl::string_view digits = text.substr(bracket + 1, text.size() - bracket - 2);
    int index;
    if (digits.empty() || !std::isdigit(static_cast<unsigned char>(digits[0])) || !absl::SimpleAtoi(digits, &index)) {
      return std::nullopt;
    }
    part.index = index;
    text = text.substr(0, bracket);
  }
  if (text.empty()) return std::nullopt;
  part.name = std::string(text);
  return part;
}

class Walker {
 public:
  Walker(SpecReader* reader, YAML::Node value) : reader_(reader), value_(std::move(value)) {}

  void Walk(const std::vector<absl::string_view>& parts, size_t at, const std::string& path, Message* message) {
    const std::optional<PathPart> part = ParsePathPart(parts[at]);
    if (!part.has_value()) {
      return Problem(JoinPath(path, parts[at]),
                     absl::StrCat("\"", parts[at], "\" is not a field name or a name with an index, as in groups[0]"));
    }
    const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(part->name);
    std::string field_path = JoinPath(path, part->name);
    if (field == nullptr) {
      std::string suggestion;
      std::string description = UnknownFieldDescription(message->GetDescriptor(), path, part->name, &suggestion);
      if (!suggestion.empty()) reader_->AddMeant(suggestion);
      return Problem(field_path, std::move(description));
    }
    const bool last = at + 1 == parts.size();
    if (part->index.has_value()) {
      if (!field->is_repeated()) return Problem(field_path, "is not a list and takes no index");
      field_path = absl::StrCat(field_path, "[", *part->index, "]");
      return WalkElement(parts, at, field_path, *part->index, field, message);
    }
    if (last) return reader_->ReadField(value_, field_path, field, message);
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) return Problem(field_path, "has no fields of its own");
    if (field->is_repeated())
      return Problem(field_path, absl::StrCat("is a list; say which element, as in ", field_path, "[0]"));
    Walk(parts, at + 1, field_path, message->GetReflection()->MutableMessage(message, field));
  }

 private:
  void WalkElement(const std::vector<absl::string_view>& parts, size_t at, const std::string& path, int index,
                   const FieldDescriptor* field, Message* message) {
    const Reflection* reflection = message->GetReflection();
    const int size = reflection->FieldSize(*message, field);
    if (index > size) return Problem(path, absl::StrCat("the list has ", size, " elements; the next index is ", size));
    const bool last = at + 1 == parts.size();
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      Message* element = index == size ? reflection->AddMessage(message, field)
                                       : reflection->MutableRepeatedMessage(message, field, index);
      return last ? reader_->ReadMessage(value_, path, element) : Walk(parts, at + 1, path, element);
    }
    if (!last) return Problem(path, "has no fields of its own");
    // Appended, moved to its place, and what stood there dropped from the end.
    reader_->ReadScalar(value_, path, field, message);
    if (index < size && reflection->FieldSize(*message, field) == size + 1) {
      reflection->SwapElements(message, field, index, size);
      reflection->RemoveLast(message, field);
    }
  }

  void Problem(const std::string& path, std::string description) {
    reader_->AddProblem(YAML::Node(), path, std::move(description));
  }

  SpecReader* reader_;
  const YAML::Node value_;
};

}  // namespace

void ApplyOverride(const std::string& text, SpecReader* reader, cluster::v1::TrainingRunSpec* spec) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    reader->AddProblem(YAML::Node(), text, "expected FIELD=VALUE, as in pipeline.stages=4");
    return;
  }
  const std::string path = text.substr(0, equals);
  YAML::Node value;
  try {
    value = YAML::Load(text.substr(equals + 1));
  } catch (const YAML::Exception& error) {
    reader->AddProblem(YAML::Node(), path, absl::StrCat("the value is not YAML: ", error.msg, "; quote it"));
    return;
  }
  reader->AddLocation(path);
  const std::vector<absl::string_view> parts = absl::StrSplit(path, '.');
  Walker(reader, value).Walk(parts, 0, "", spec);
}

}  // namespace moonpipe
