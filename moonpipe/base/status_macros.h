// Early return on a failed absl::Status. Abseil 20220623 has none of its own.
//
//   MOONPIPE_RETURN_IF_ERROR(file.Write(bytes));
//   MOONPIPE_ASSIGN_OR_RETURN(auto header, ReadHeader(path));
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#define MOONPIPE_RETURN_IF_ERROR(expr)              \
  do {                                              \
    ::absl::Status moonpipe_status_ = (expr);       \
    if (!moonpipe_status_.ok()) return moonpipe_status_; \
  } while (false)

#define MOONPIPE_CONCAT_INNER_(a, b) a##b
#define MOONPIPE_CONCAT_(a, b) MOONPIPE_CONCAT_INNER_(a, b)
#define MOONPIPE_ASSIGN_OR_RETURN(lhs, expr) \
  MOONPIPE_ASSIGN_OR_RETURN_IMPL_(MOONPIPE_CONCAT_(moonpipe_statusor_, __LINE__), lhs, expr)
#define MOONPIPE_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr) \
  auto statusor = (expr);                                    \
  if (!statusor.ok()) return std::move(statusor).status();   \
  lhs = std::move(statusor).value()

namespace moonpipe {

// The same code with "CONTEXT: " before the message; OK stays OK. Payloads are kept.
inline absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { annotated.SetPayload(url, payload); });
  return annotated;
}

}  // namespace moonpipe
