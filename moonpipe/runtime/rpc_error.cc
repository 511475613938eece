#include "moonpipe/runtime/rpc_error.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "google/rpc/status.pb.h"

namespace moonpipe {
namespace {

constexpr char kTypeUrlPrefix[] = "type.googleapis.com/";
// Message (percent-encoded), its copy and the details (base64) must stay below 8 KiB of metadata together.
constexpr size_t kLongestMessage = 1200;
constexpr size_t kLargestDetails = 3000;

template <typename Detail>
std::string TypeUrl() {
  return kTypeUrlPrefix + Detail::descriptor()->full_name();
}

template <typename Detail>
absl::Status With(absl::Status status, const Detail& detail) {
  if (!status.ok()) status.SetPayload(TypeUrl<Detail>(), absl::Cord(detail.SerializeAsString()));
  return status;
}

google::rpc::BadRequest ToBadRequest(const std::vector<FieldViolation>& violations) {
  google::rpc::BadRequest bad_request;
  for (const FieldViolation& violation : violations) {
    auto* added = bad_request.add_field_violations();
    added->set_field(violation.field);
    added->set_description(violation.description);
  }
  return bad_request;
}

// Never in the middle of a UTF-8 sequence.
std::string Cut(absl::string_view text, size_t longest) {
  if (text.size() <= longest) return std::string(text);
  size_t end = longest;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return absl::StrCat(text.substr(0, end), " ... (", text.size() - end, " more bytes)");
}

google::rpc::BadRequest CutViolations(google::rpc::BadRequest bad_request) {
  int dropped = 0;
  while (bad_request.field_violations_size() > 1 && bad_request.ByteSizeLong() > kLargestDetails) {
    bad_request.mutable_field_violations()->RemoveLast();
    ++dropped;
  }
  if (dropped > 0) {
    auto* note = bad_request.add_field_violations();
    note->set_field("*");
    note->set_description(absl::StrCat(dropped, " more violations do not fit into an error; mend these first"));
  }
  return bad_request;
}

}  // namespace

absl::Status RpcError(absl::StatusCode code, absl::string_view message, const std::string& reason,
                      const std::map<std::string, std::string>& metadata) {
  return WithErrorInfo(absl::Status(code, message), reason, metadata);
}

absl::Status WithErrorInfo(absl::Status status, const std::string& reason,
                           const std::map<std::string, std::string>& metadata) {
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain(kErrorDomain);
  for (const auto& [key, value] : metadata) (*info.mutable_metadata())[key] = value;
  return With(std::move(status), info);
}

absl::Status WithFieldViolations(absl::Status status, const std::vector<FieldViolation>& violations) {
  return With(std::move(status), ToBadRequest(violations));
}

absl::Status WithPreconditionFailure(absl::Status status, const std::string& type, const std::string& subject,
                                     const std::string& description) {
  google::rpc::PreconditionFailure failure;
  auto* violation = failure.add_violations();
  violation->set_type(type);
  violation->set_subject(subject);
  violation->set_description(description);
  return With(std::move(status), failure);
}

absl::Status WithResourceInfo(absl::Status status, const std::string& type, const std::string& name,
                              const std::string& description) {
  google::rpc::ResourceInfo info;
  info.set_resource_type(type);
  info.set_resource_name(name);
  info.set_description(description);
  return With(std::move(status), info);
}

absl::Status WithRetryInfo(absl::Status status, absl::Duration delay) {
  google::rpc::RetryInfo info;
  const int64_t nanoseconds = absl::ToInt64Nanoseconds(delay);
  info.mutable_retry_delay()->set_seconds(nanoseconds / 1000000000);
  info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(nanoseconds % 1000000000));
  return With(std::move(status), info);
}

absl::Status InvalidSpecError(const std::vector<FieldViolation>& violations) {
  if (violations.empty()) return absl::OkStatus();
  const std::string list = absl::StrJoin(violations, "; ", [](std::string* out, const FieldViolation& violation) {
    absl::StrAppend(out, violation.field, " ", violation.description);
  });
  const std::string message =
      absl::StrCat("the spec has ", violations.size(), violations.size() == 1 ? " problem: " : " problems: ", list);
  return WithFieldViolations(RpcError(absl::StatusCode::kInvalidArgument, message, "INVALID_SPEC",
                                      {{"violations", absl::StrCat(violations.size())}}),
                             violations);
}

std::string ErrorReason(const absl::Status& status) {
  const auto info = GetDetail<google::rpc::ErrorInfo>(status);
  return info.has_value() ? info->reason() : "";
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status wire;
  wire.set_code(static_cast<int>(status.code()));
  wire.set_message(Cut(status.message(), kLongestMessage));
  bool has_error_info = false;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    if (!absl::StartsWith(url, kTypeUrlPrefix)) return;
    has_error_info = has_error_info || url == TypeUrl<google::rpc::ErrorInfo>();
    auto* detail = wire.add_details();
    detail->set_type_url(std::string(url));
    google::rpc::BadRequest bad_request;
    if (url == TypeUrl<google::rpc::BadRequest>() && bad_request.ParseFromString(std::string(payload))) {
      detail->set_value(CutViolations(std::move(bad_request)).SerializeAsString());
    } else {
      detail->set_value(std::string(payload));
    }
  });
  if (!has_error_info) {
    google::rpc::ErrorInfo info;
    info.set_reason(absl::StatusCodeToString(status.code()));
    info.set_domain(kErrorDomain);
    wire.add_details()->PackFrom(info);
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), wire.message(), wire.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status wire;
  if (status.error_details().empty() || !wire.ParseFromString(status.error_details())) return result;
  for (const auto& detail : wire.details()) result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  return result;
}

}  // namespace moonpipe
