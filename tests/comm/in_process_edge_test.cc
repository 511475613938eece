#include "moonpipe/comm/in_process_edge.h"

#include <thread>

#include "edge_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

using ::testing::HasSubstr;

absl::Status SendOne(InProcessEdge& edge, uint32_t microbatch, absl::Time deadline = Soon()) {
  return edge.sender->Send(BytesHeader(100, microbatch), PayloadOf(MakeBytes(100, microbatch)), deadline);
}
absl::Status ReceiveOne(InProcessEdge& edge, uint32_t microbatch, absl::Time deadline = Soon()) {
  std::vector<uint8_t> got(100);
  const absl::Status status = edge.receiver->Receive(BytesHeader(100, microbatch), got.data(), deadline);
  if (status.ok()) {
    EXPECT_TRUE(got == *MakeBytes(100, microbatch));
  }
  return status;
}

TEST(InProcessEdge, CarriesAndCountsLikeASocket) {
  InProcessEdge edge = MakeInProcessEdge("features", {});
  EXPECT_FALSE(edge.receiver->Ready());
  ASSERT_TRUE(SendOne(edge, 0).ok());
  ASSERT_TRUE(SendOne(edge, 1).ok());
  EXPECT_TRUE(edge.receiver->Ready());
  EXPECT_TRUE(ReceiveOne(edge, 0).ok());
  EXPECT_TRUE(ReceiveOne(edge, 1).ok());
  EXPECT_TRUE(edge.sender->Flush(Soon()).ok());
  EXPECT_EQ(edge.receiver->counters().payload_bytes, 200u);
  EXPECT_EQ(edge.sender->counters().frame_bytes, 232u);
  EXPECT_EQ(edge.sender->transport(), "local");
}

TEST(InProcessEdge, BlocksAtCapacityAndEndsAtTheDeadline) {
  InProcessEdge edge = MakeInProcessEdge("features", {.capacity = 2});
  ASSERT_TRUE(SendOne(edge, 0).ok());
  ASSERT_TRUE(SendOne(edge, 1).ok());
  EXPECT_EQ(SendOne(edge, 2, In(5)).code(), absl::StatusCode::kDeadlineExceeded);
  InProcessEdge silent = MakeInProcessEdge("features", {});
  EXPECT_THAT(std::string(ReceiveOne(silent, 0, In(5)).message()), HasSubstr("edge features: waited"));
}

TEST(InProcessEdge, DropsTheConnectionAfterSoManyMessages) {
  InProcessEdge edge = MakeInProcessEdge("features", {.faults = {.drop_after_messages = 1}});
  ASSERT_TRUE(SendOne(edge, 0).ok());
  EXPECT_EQ(SendOne(edge, 1).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(ReceiveOne(edge, 0).ok()) << "what arrived before is still given";
  EXPECT_EQ(ReceiveOne(edge, 1).code(), absl::StatusCode::kUnavailable);
}

TEST(InProcessEdge, CorruptsTheByteOfTheMessage) {
  InProcessEdge edge = MakeInProcessEdge("features", {.faults = {.corrupt = EdgeFaults::Corrupt{.message = 1, .byte = 99}}});
  ASSERT_TRUE(SendOne(edge, 0).ok());
  ASSERT_TRUE(SendOne(edge, 1).ok());
  EXPECT_TRUE(ReceiveOne(edge, 0).ok());
  EXPECT_EQ(ReceiveOne(edge, 1).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(SendOne(edge, 2).code(), absl::StatusCode::kUnavailable) << "the peer has left";
}

TEST(InProcessEdge, HoldsMessagesBackUntilReleased) {
  InProcessEdge edge = MakeInProcessEdge("features", {.faults = {.hold = true}});
  ASSERT_TRUE(SendOne(edge, 0).ok());
  EXPECT_FALSE(edge.receiver->Ready());
  std::thread receiving([&] { EXPECT_TRUE(ReceiveOne(edge, 0).ok()); });
  edge.release();
  receiving.join();
}

TEST(InProcessEdge, RewritesAHeaderOnTheWay) {
  EdgeFaults faults;
  faults.rewrite_header = [](uint64_t message, MessageHeader& header) {
    if (message == 1) header.generation = 2;
  };
  InProcessEdge edge = MakeInProcessEdge("features", {.faults = faults});
  ASSERT_TRUE(SendOne(edge, 0).ok());
  ASSERT_TRUE(SendOne(edge, 1).ok());
  EXPECT_TRUE(ReceiveOne(edge, 0).ok());
  const absl::Status status = ReceiveOne(edge, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("expected generation 3"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("got generation 2"));
}

TEST(InProcessEdge, AbortWakesTheWaiterWithItsReasonAndThePeerWithItsAbsence) {
  InProcessEdge edge = MakeInProcessEdge("features", {});
  std::thread receiving([&] {
    const absl::Status status = ReceiveOne(edge, 0, absl::InfiniteFuture());
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  });
  edge.receiver->Abort(absl::AbortedError("generation 4 begins"));
  receiving.join();
  EXPECT_EQ(SendOne(edge, 0).code(), absl::StatusCode::kUnavailable);
  edge.sender.reset();
}

TEST(InProcessEdge, RefusesOversizeWithBothSizesAndGoesOn) {
  InProcessEdge edge = MakeInProcessEdge("features", {.max_message_bytes = 99});
  EXPECT_THAT(std::string(SendOne(edge, 0).message()), HasSubstr("message of 100 bytes is over the limit of 99 bytes"));
  EXPECT_EQ(ReceiveOne(edge, 0).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(edge.sender->Send(BytesHeader(99), PayloadOf(MakeBytes(99)), Soon()).ok());
}

}  // namespace
}  // namespace moonpipe
