// "did you mean": the known name that is nearest to a mistyped one.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace moonpipe {

// Up to `limit` of `known`, nearest first by edit distance; names further than half their length are left out.
std::vector<std::string> NearestNames(absl::string_view name, const std::vector<std::string>& known, size_t limit = 1);

}  // namespace moonpipe
