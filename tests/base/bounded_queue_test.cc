#include "moonpipe/base/bounded_queue.h"

#include <thread>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

TEST(BoundedQueue, GivesItemsInOrder) {
  BoundedQueue<int> queue(2);
  ASSERT_TRUE(queue.Push(1, absl::InfiniteFuture()).ok());
  ASSERT_TRUE(queue.Push(2, absl::InfiniteFuture()).ok());
  EXPECT_EQ(*queue.Pop(absl::InfiniteFuture()), 1);
  EXPECT_EQ(*queue.Pop(absl::InfiniteFuture()), 2);
}

TEST(BoundedQueue, TellsFullFromEmptyFromClosed) {
  BoundedQueue<int> queue(1);
  EXPECT_EQ(queue.Pop(absl::InfinitePast()).status().code(), absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(queue.Push(1, absl::InfinitePast()).ok());
  EXPECT_EQ(queue.Push(2, absl::InfinitePast()).message(), "queue is full");
  queue.Close(absl::AbortedError("plan 3 is over"));
  EXPECT_EQ(queue.Push(3, absl::InfiniteFuture()).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(*queue.Pop(absl::InfiniteFuture()), 1) << "what was queued before the close is still given";
  EXPECT_EQ(queue.Pop(absl::InfiniteFuture()).status().message(), "plan 3 is over");
}

TEST(BoundedQueue, CloseWakesAWaitingConsumer) {
  BoundedQueue<int> queue(1);
  std::thread closer([&] { queue.Close(absl::CancelledError("bye")); });
  EXPECT_EQ(queue.Pop(absl::InfiniteFuture()).status().code(), absl::StatusCode::kCancelled);
  closer.join();
}

}  // namespace
}  // namespace moonpipe
