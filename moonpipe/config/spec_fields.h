// How the fields of a spec look in YAML: names, scalars and enum values, read from the message descriptors, so that the
// proto stays the only schema. Shared by the reader, the overrides and the writer.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "yaml-cpp/yaml.h"

namespace moonpipe {

// A problem and where it stands. `location` is `run.yaml:3:5` (line and column from 1) or `--set pipeline.stages=x`.
struct SpecProblem {
  std::string location;
  std::string field;
  std::string description;
};

// Reads YAML nodes into messages. Every problem is recorded and reading goes on, so that a person sees all of them at
// once.
class SpecReader {
 public:
  // `source` is the file's name, or the whole override; only a file has lines and columns (`with_position`).
  SpecReader(std::string source, bool with_position) : source_(std::move(source)), with_position_(with_position) {}

  // Fields of `message` from a mapping. `path` is the message's own path, empty for the spec itself.
  void ReadMessage(const YAML::Node& node, const std::string& path, google::protobuf::Message* message);

  // One field, whatever its kind; a repeated one is replaced.
  void ReadField(const YAML::Node& node, const std::string& path, const google::protobuf::FieldDescriptor* field,
                 google::protobuf::Message* message);

  // One scalar: sets a singular field or appends to a repeated one.
  void ReadScalar(const YAML::Node& node, const std::string& path, const google::protobuf::FieldDescriptor* field,
                  google::protobuf::Message* message);

  void AddProblem(const YAML::Node& node, const std::string& path, std::string description);

  std::vector<SpecProblem>& problems() { return problems_; }
  // Where each field that was set stands.
  const std::vector<std::pair<std::string, std::string>>& locations() const { return locations_; }
  // Fields that a misspelt name probably means; they are not missing as well.
  const std::vector<std::string>& meant() const { return meant_; }
  void AddLocation(const std::string& path) { locations_.emplace_back(path, source_); }
  void AddMeant(std::string path) { meant_.push_back(std::move(path)); }

 private:
  std::string Location(const YAML::Node& node) const;

  const std::string source_;
  const bool with_position_;
  std::vector<SpecProblem> problems_;
  std::vector<std::pair<std::string, std::string>> locations_;
  std::vector<std::string> meant_;
};

// `no such field; did you mean stages?`, looking first beside the name and then in the whole spec. `suggestion` gets
// the path of the field that is meant, if any.
std::string UnknownFieldDescription(const google::protobuf::Descriptor* message, const std::string& path,
                                    const std::string& name, std::string* suggestion);

// `first_stage` for PLACEMENT_FIRST_STAGE: the value without its enum's prefix, in lower case.
std::string EnumValueName(const google::protobuf::EnumValueDescriptor* value);

// The names of an enum without the unspecified one.
std::vector<std::string> EnumValueNames(const google::protobuf::EnumDescriptor* type);

// `path.name`, or `name` where the path is empty.
std::string JoinPath(const std::string& path, absl::string_view name);

}  // namespace moonpipe
