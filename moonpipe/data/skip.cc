#include "moonpipe/data/skip.h"

#include "absl/strings/cord.h"

namespace moonpipe {
namespace {
constexpr char kPayload[] = "moonpipe/skip_reason";
}  // namespace

absl::Status SkipError(absl::string_view reason, absl::string_view detail) {
  absl::Status status = absl::InvalidArgumentError(detail);
  status.SetPayload(kPayload, absl::Cord(reason));
  return status;
}

std::optional<std::string> SkipReason(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return std::nullopt;
  return std::string(*payload);
}

}  // namespace moonpipe
