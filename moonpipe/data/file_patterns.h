// Names of files in the ways that data sets are written down.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace moonpipe {

// Expands `{000000..000127}` (both ends inclusive, zero-padded as written), `{a,b}` and the shell's `*`, `?` and `[...]`. The
// files of one pattern are sorted by name; patterns keep their order. NOT_FOUND for a pattern, or a name that a brace makes,
// without a file; INVALID_ARGUMENT for an ill-formed brace.
absl::StatusOr<std::vector<std::string>> ExpandFilePatterns(const std::vector<std::string>& patterns);

}  // namespace moonpipe
