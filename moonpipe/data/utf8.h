// Text that may hold anything, for places that take UTF-8 only (protobuf strings among them).
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace moonpipe {

// Each maximal ill-formed part becomes one U+FFFD, as with Python's errors="replace"; well-formed text stays as it is.
std::string ReplaceInvalidUtf8(absl::string_view bytes);

}  // namespace moonpipe
