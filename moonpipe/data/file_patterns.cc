#include "moonpipe/data/file_patterns.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

constexpr int64_t kMostShards = 1000000;

absl::StatusOr<std::vector<std::string>> Alternatives(absl::string_view body) {
  const size_t dots = body.find("..");
  if (dots == absl::string_view::npos) return std::vector<std::string>(absl::StrSplit(body, ','));
  const absl::string_view first_text = body.substr(0, dots), last_text = body.substr(dots + 2);
  int64_t first = 0, last = 0;
  if (!absl::SimpleAtoi(first_text, &first) || !absl::SimpleAtoi(last_text, &last) || first < 0 || last < first ||
      last - first >= kMostShards) {
    return absl::InvalidArgumentError(absl::StrCat("{", body, "} is not a rising range of at most ", kMostShards, " numbers"));
  }
  std::vector<std::string> result;
  for (int64_t i = first; i <= last; ++i) {
    const std::string digits = absl::StrCat(i);
    const size_t width = std::max(first_text.size(), digits.size());
    result.push_back(std::string(width - digits.size(), '0') + digits);
  }
  return result;
}

absl::Status ExpandBraces(const std::string& pattern, std::vector<std::string>& out) {
  const size_t open = pattern.find('{');
  if (open == std::string::npos) {
    out.push_back(pattern);
    return absl::OkStatus();
  }
  const size_t close = pattern.find('}', open);
  if (close == std::string::npos) return absl::InvalidArgumentError(absl::StrCat("no closing brace in ", pattern));
  MOONPIPE_ASSIGN_OR_RETURN(const auto middles, Alternatives(absl::string_view(pattern).substr(open + 1, close - open - 1)));
  for (const std::string& middle : middles) {
    MOONPIPE_RETURN_IF_ERROR(ExpandBraces(absl::StrCat(pattern.substr(0, open), middle, pattern.substr(close + 1)), out));
  }
  return absl::OkStatus();
}

absl::Status ExpandShell(const std::string& pattern, std::vector<std::string>& out) {
  glob_t found{};
  const int code = ::glob(pattern.c_str(), GLOB_ERR, nullptr, &found);
  for (size_t i = 0; i < found.gl_pathc; ++i) out.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  if (code == 0) return absl::OkStatus();
  if (code == GLOB_NOMATCH) return absl::NotFoundError(absl::StrCat("no file matches ", pattern));
  return absl::InternalError(absl::StrCat("cannot list the files of ", pattern));
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ExpandFilePatterns(const std::vector<std::string>& patterns) {
  std::vector<std::string> files;
  for (const std::string& pattern : patterns) {
    std::vector<std::string> names, matches;
    MOONPIPE_RETURN_IF_ERROR(ExpandBraces(pattern, names));
    for (const std::string& name : names) {
      std::error_code error;
      if (std::filesystem::exists(name, error)) {
        matches.push_back(name);
      } else if (name.find_first_of("*?[") != std::string::npos) {
        MOONPIPE_RETURN_IF_ERROR(ExpandShell(name, matches));
      } else {
        return absl::NotFoundError(absl::StrCat("no file ", name, name == pattern ? "" : absl::StrCat(", which ", pattern, " asks for")));
      }
    }
    std::sort(matches.begin(), matches.end());
    files.insert(files.end(), matches.begin(), matches.end());
  }
  if (files.empty()) return absl::NotFoundError("no data files are named");
  return files;
}

}  // namespace moonpipe
