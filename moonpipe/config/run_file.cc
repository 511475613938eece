#include "moonpipe/config/run_file.h"

#include <filesystem>
#include <iterator>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/overrides.h"
#include "moonpipe/config/spec_fields.h"

namespace moonpipe {
namespace {

using cluster::v1::TrainingRunSpec;

// The path of the message that holds a field: `a.b[0].c` -> `a.b[0]` -> `a.b` -> `a` -> ``.
std::string ParentPath(const std::string& path) {
  if (absl::EndsWith(path, "]")) return path.substr(0, path.rfind('['));
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

// What the reader found, and where everything stands.
class Report {
 public:
  explicit Report(std::string name) : name_(std::move(name)) {}

  void Take(SpecReader* reader) {
    for (const auto& [field, location] : reader->locations()) {
      // An override replaces all that stood below its field.
      const auto below = [&](const std::string& path) {
        return absl::StartsWith(path, field) && path.find_first_of(".[", field.size()) == field.size();
      };
      for (auto at = locations_.upper_bound(field); at != locations_.end() && absl::StartsWith(at->first, field);) {
        at = below(at->first) ? locations_.erase(at) : std::next(at);
      }
      locations_[field] = location;
    }
    for (const std::string& field : reader->meant()) settled_.insert(field);
    for (SpecProblem& problem : reader->problems()) {
      settled_.insert(problem.field);
      problems_.push_back(std::move(problem));
    }
  }

  // A field that could not be read is not reported again as missing or out of range.
  void Take(const std::vector<FieldViolation>& violations) {
    for (const FieldViolation& violation : violations) {
      if (IsSettled(violation.field)) continue;
      problems_.push_back({LocationOf(violation.field), violation.field, violation.description});
    }
  }

  bool empty() const { return problems_.empty(); }

  absl::Status ToStatus() const {
    std::string message =
        absl::StrCat(name_, " has ", problems_.size(), problems_.size() == 1 ? " problem:" : " problems:");
    for (const SpecProblem& problem : problems_) {
      absl::StrAppend(&message, "\n  ", problem.location, ": ", problem.field, problem.field.empty() ? "" : ": ",
                      problem.description);
    }
    return absl::InvalidArgumentError(message);
  }

 private:
  bool IsSettled(std::string field) const {
    for (; !field.empty(); field = ParentPath(field)) {
      if (settled_.count(field) > 0) return true;
    }
    return false;
  }

  std::string LocationOf(std::string field) const {
    for (; !field.empty(); field = ParentPath(field)) {
      const auto at = locations_.find(field);
      if (at != locations_.end()) return at->second;
    }
    return name_;
  }

  const std::string name_;
  std::vector<SpecProblem> problems_;
  std::map<std::string, std::string> locations_;
  std::set<std::string> settled_;
};

}  // namespace

absl::StatusOr<TrainingRunSpec> LoadRunFile(const std::string& path, const std::vector<std::string>& overrides) {
  MOONPIPE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  return ParseRunFile(text, path, std::filesystem::absolute(path).parent_path().string(), overrides);
}

absl::StatusOr<TrainingRunSpec> ParseRunFile(const std::string& text, const std::string& name,
                                             const std::string& folder, const std::vector<std::string>& overrides) {
  std::vector<YAML::Node> documents;
  try {
    documents = YAML::LoadAll(text);
  } catch (const YAML::Exception& error) {
    const std::string where =
        error.mark.is_null() ? "" : absl::StrCat(":", error.mark.line + 1, ":", error.mark.column + 1);
    return absl::InvalidArgumentError(absl::StrCat(name, where, ": not YAML: ", error.msg));
  }
  if (documents.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has ", documents.size(), " YAML documents; a run file has one: remove the --- lines"));
  }

  TrainingRunSpec spec;
  Report report(name);
  SpecReader reader(name, /*with_position=*/true);
  if (!documents.empty()) reader.ReadMessage(documents[0], "", &spec);
  report.Take(&reader);
  for (const std::string& override_text : overrides) {
    SpecReader override_reader(absl::StrCat("--set ", override_text), /*with_position=*/false);
    ApplyOverride(override_text, &override_reader, &spec);
    report.Take(&override_reader);
  }
  ResolvePaths(folder, &spec);
  ResolveDefaults(&spec);
  report.Take(ValidateSpec(spec));
  if (!report.empty()) return report.ToStatus();
  return spec;
}

std::vector<std::string> PreprocessorFolders(const TrainingRunSpec& spec) {
  std::vector<std::string> folders;
  if (spec.model().has_path()) folders.push_back(spec.model().path());
  if (spec.model().has_config()) folders.push_back(std::filesystem::path(spec.model().config()).parent_path().string());
  if (spec.data().has_tokenizer()) folders.push_back(spec.data().tokenizer());
  return folders;
}

void ResolvePaths(const std::string& folder, TrainingRunSpec* spec) {
  const std::filesystem::path base = std::filesystem::absolute(folder);
  const auto resolve = [&](std::string* path) {
    if (!path->empty() && std::filesystem::path(*path).is_relative())
      *path = (base / *path).lexically_normal().string();
  };
  if (spec->model().has_path()) resolve(spec->mutable_model()->mutable_path());
  if (spec->model().has_config()) resolve(spec->mutable_model()->mutable_config());
  if (spec->has_data()) {
    for (std::string& file : *spec->mutable_data()->mutable_train()) resolve(&file);
    if (spec->data().has_batches()) resolve(spec->mutable_data()->mutable_batches());
    if (spec->data().has_tokenizer()) resolve(spec->mutable_data()->mutable_tokenizer());
  }
  if (spec->has_eval()) {
    for (auto& set : *spec->mutable_eval()->mutable_sets()) {
      for (std::string& file : *set.mutable_files()) resolve(&file);
    }
  }
}

}  // namespace moonpipe
