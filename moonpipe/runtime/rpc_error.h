// Errors that programs can tell apart, as they cross gRPC. Inside a process the details of google.rpc ride on
// absl::Status as payloads under their type URLs; on the wire they are a google.rpc.Status in
// `grpc-status-details-bin`.
//
//   absl::Status status = RpcError(absl::StatusCode::kAborted, "step 7 has generation 3, the plan has 4",
//   "STALE_GENERATION",
//                                  {{"generation", "3"}, {"plan_generation", "4"}});
//   reactor->Finish(ToGrpcStatus(status));                     // server
//   absl::Status same = FromGrpcStatus(status_of_call);        // client
//   ErrorReason(same) == "STALE_GENERATION";
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "google/rpc/error_details.pb.h"
#include "grpcpp/support/status.h"
#include "moonpipe/config/field_violation.h"

namespace moonpipe {

inline constexpr char kErrorDomain[] = "moonpipe.dev";

// A status with google.rpc.ErrorInfo. `reason` is UPPER_SNAKE of at most 63 characters and never changes its meaning;
// every dynamic part of the message also stands in `metadata`.
absl::Status RpcError(absl::StatusCode code, absl::string_view message, const std::string& reason,
                      const std::map<std::string, std::string>& metadata = {});

// Each adds one detail to a failed status and returns it; a detail of the same type is replaced. OK stays OK.
absl::Status WithErrorInfo(absl::Status status, const std::string& reason,
                           const std::map<std::string, std::string>& metadata = {});
absl::Status WithFieldViolations(absl::Status status, const std::vector<FieldViolation>& violations);
// `type` is UPPER_SNAKE, `subject` the resource's name, `description` what to do.
absl::Status WithPreconditionFailure(absl::Status status, const std::string& type, const std::string& subject,
                                     const std::string& description);
absl::Status WithResourceInfo(absl::Status status, const std::string& type, const std::string& name,
                              const std::string& description);
// The caller may try again after `delay`.
absl::Status WithRetryInfo(absl::Status status, absl::Duration delay);

// INVALID_ARGUMENT / INVALID_SPEC with every violation in the message and in google.rpc.BadRequest. OK for no
// violations.
absl::Status InvalidSpecError(const std::vector<FieldViolation>& violations);

// The reason of the status's ErrorInfo; empty where it has none.
std::string ErrorReason(const absl::Status& status);

// One detail, for example GetDetail<google::rpc::BadRequest>(status); nothing where it is absent or does not parse.
template <typename Detail>
std::optional<Detail> GetDetail(const absl::Status& status) {
  const auto payload = status.GetPayload("type.googleapis.com/" + Detail::descriptor()->full_name());
  Detail detail;
  if (!payload.has_value() || !detail.ParseFromString(std::string(*payload))) return std::nullopt;
  return detail;
}

// To the wire. A status without ErrorInfo gets one whose reason is the name of its code. Trailing metadata is limited
// to 8 KiB by default in every gRPC client: message and violations are cut to fit, and say so.
grpc::Status ToGrpcStatus(const absl::Status& status);

// From the wire, details included. Details that do not parse are dropped.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace moonpipe
