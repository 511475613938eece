// A sample that cannot be used is not an error of the run: it is skipped and counted. Such a failure travels as an
// INVALID_ARGUMENT status that bears its reason, so that it can be told from a failure of the machine (a read error, say), which
// must never make a sample vanish.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace moonpipe {

inline constexpr char kBadJson[] = "bad_json";                // KEY.json is not JSON
inline constexpr char kBadRecord[] = "bad_record";            // JSON, but not messages and images as they should be
inline constexpr char kMissingPicture[] = "missing_picture";  // a named picture does not exist
inline constexpr char kBadPicture[] = "bad_picture";          // a picture is damaged, of an unsupported format, or too large
inline constexpr char kTooLong[] = "too_long";                // more tokens than a microbatch holds

// A failure of one sample; `detail` is its message.
absl::Status SkipError(absl::string_view reason, absl::string_view detail);

// The reason, where `status` was made by SkipError.
std::optional<std::string> SkipReason(const absl::Status& status);

}  // namespace moonpipe
