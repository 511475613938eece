#include "moonpipe/runtime/rpc_error.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

using testing::HasSubstr;

TEST(RpcError, CrossesTheWireWithItsDetails) {
  absl::Status status =
      RpcError(absl::StatusCode::kAborted, "generation 3, plan 4", "STALE_GENERATION", {{"generation", "3"}});
  status = WithPreconditionFailure(std::move(status), "STATE", "trainingRuns/a", "resume it");
  status = WithResourceInfo(std::move(status), "moonpipe.dev/Checkpoint", "step-1", "missing");
  status = WithRetryInfo(std::move(status), absl::Milliseconds(1500));
  const absl::Status back = FromGrpcStatus(ToGrpcStatus(status));
  EXPECT_EQ(back, status);
  EXPECT_EQ(ErrorReason(back), "STALE_GENERATION");
  const auto info = GetDetail<google::rpc::ErrorInfo>(back);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->domain(), "moonpipe.dev");
  EXPECT_EQ(info->metadata().at("generation"), "3");
  EXPECT_EQ(GetDetail<google::rpc::PreconditionFailure>(back)->violations(0).subject(), "trainingRuns/a");
  EXPECT_EQ(GetDetail<google::rpc::ResourceInfo>(back)->resource_name(), "step-1");
  EXPECT_EQ(GetDetail<google::rpc::RetryInfo>(back)->retry_delay().nanos(), 500000000);
  EXPECT_FALSE(GetDetail<google::rpc::BadRequest>(back).has_value());
}

TEST(RpcError, APlainStatusGetsItsCodeAsReason) {
  const absl::Status back = FromGrpcStatus(ToGrpcStatus(absl::NotFoundError("no run")));
  EXPECT_EQ(back.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(back.message(), "no run");
  EXPECT_EQ(ErrorReason(back), "NOT_FOUND");
}

TEST(RpcError, OkStaysOk) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
  EXPECT_TRUE(WithErrorInfo(absl::OkStatus(), "X").ok());
  EXPECT_TRUE(InvalidSpecError({}).ok());
}

TEST(RpcError, AnnotatingKeepsTheDetails) {
  EXPECT_EQ(ErrorReason(Annotate(RpcError(absl::StatusCode::kInternal, "x", "BROKEN"), "while saving")), "BROKEN");
}

TEST(RpcError, ASpecErrorNamesEveryField) {
  const absl::Status status =
      InvalidSpecError({{"train.steps", "is required"}, {"pipeline.stages", "must be at least 1, found 0"}});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "the spec has 2 problems: train.steps is required; pipeline.stages must be at least 1, found 0");
  const auto bad_request = GetDetail<google::rpc::BadRequest>(FromGrpcStatus(ToGrpcStatus(status)));
  ASSERT_TRUE(bad_request.has_value());
  ASSERT_EQ(bad_request->field_violations_size(), 2);
  EXPECT_EQ(bad_request->field_violations(1).field(), "pipeline.stages");
}

TEST(RpcError, IsCutToWhatTrailingMetadataCanHold) {
  std::vector<FieldViolation> violations;
  for (int i = 0; i < 1000; ++i)
    violations.push_back({absl::StrCat("optimizer.groups[", i, "].match"), "is required: \u00fcber all"});
  const grpc::Status wire = ToGrpcStatus(InvalidSpecError(violations));
  EXPECT_LT(wire.error_message().size() + wire.error_details().size() * 4 / 3, 8000u);
  const auto bad_request = GetDetail<google::rpc::BadRequest>(FromGrpcStatus(wire));
  ASSERT_TRUE(bad_request.has_value());
  EXPECT_GT(bad_request->field_violations_size(), 10);
  EXPECT_THAT(bad_request->field_violations().rbegin()->description(), HasSubstr("more violations"));
  EXPECT_THAT(wire.error_message(), HasSubstr("more bytes)"));
}

TEST(RpcError, DetailsThatDoNotParseAreDropped) {
  const absl::Status status = FromGrpcStatus(grpc::Status(grpc::StatusCode::INTERNAL, "broken", "\xff\xff"));
  EXPECT_EQ(status, absl::InternalError("broken"));
}

}  // namespace
}  // namespace moonpipe
