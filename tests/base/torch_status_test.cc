#include "moonpipe/base/torch_status.h"

#include <torch/torch.h>

#include <new>
#include <stdexcept>

#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

absl::Status Caught(const std::function<void()>& work) {
  return CatchTorch([&]() -> absl::Status {
    work();
    return absl::OkStatus();
  });
}

TEST(TorchStatusTest, WorkThatThrowsNothingGivesItsOwnResult) {
  const absl::StatusOr<torch::Tensor> sum = CatchTorch([]() -> absl::StatusOr<torch::Tensor> { return torch::ones({2}) + 1; });
  ASSERT_TRUE(sum.ok());
  EXPECT_EQ((*sum)[1].item<float>(), 2);
  EXPECT_EQ(CatchTorch([]() -> absl::Status { return absl::NotFoundError("mine"); }), absl::NotFoundError("mine"));
}

TEST(TorchStatusTest, AFailedCheckIsInternalAndKeepsItsNumbersWithoutABacktrace) {
  const absl::Status status = Caught([] { TORCH_CHECK(false, "the tower gave ", 3, " rows for ", 4); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("the tower gave 3 rows for 4"), Not(HasSubstr("Exception raised from"))));
}

TEST(TorchStatusTest, ShapesThatDoNotFitAreInternalWithTheShapes) {
  const absl::Status status = Caught([] { torch::mm(torch::ones({2, 3}), torch::ones({4, 5})); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("2x3"), HasSubstr("4x5")));
}

TEST(TorchStatusTest, ValuesAndIndicesOutsideTheirRangeAreInvalidArguments) {
  EXPECT_EQ(Caught([] { TORCH_CHECK_VALUE(false, "a bad value"); }).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Caught([] { torch::ones({2}).select(0, 7); }).code(), absl::StatusCode::kInvalidArgument);
}

TEST(TorchStatusTest, ATensorThatNoMemoryHoldsIsResourceExhausted) {
  const absl::Status status = Caught([] { torch::empty({int64_t{1} << 60}, torch::kUInt8); });
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(Caught([] { throw std::bad_alloc(); }).code(), absl::StatusCode::kResourceExhausted);
}

TEST(TorchStatusTest, ABackwardThatThrowsIsCaughtOnTheCallingThread) {
  const absl::Status status = Caught([] { torch::ones({2}).sum().backward(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("grad"));
}

TEST(TorchStatusTest, WhateverElseIsThrownBecomesAStatusToo) {
  EXPECT_EQ(Caught([] { throw std::runtime_error("words"); }), absl::InternalError("words"));
  EXPECT_EQ(Caught([] { throw 7; }).code(), absl::StatusCode::kUnknown);
}

}  // namespace
}  // namespace moonpipe
