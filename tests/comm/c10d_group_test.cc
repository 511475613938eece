#include "moonpipe/comm/c10d_group.h"

#include <cmath>
#include <functional>
#include <thread>
#include <vector>

#include <ATen/ATen.h>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/comm/in_memory_rendezvous.h"
#include "moonpipe/comm/stream_store.h"

namespace moonpipe {
namespace {

using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

// Builds a group of `size` members, one a thread, and lets each do `work`.
void WithMembers(int size, const std::function<void(Group&)>& work, Rendezvous* rendezvous = nullptr) {
  InMemoryRendezvous own;
  if (rendezvous == nullptr) rendezvous = &own;
  std::vector<std::thread> members;
  for (int rank = 0; rank < size; ++rank) {
    members.emplace_back([&, rank] {
      auto group = MakeGlooGroup({.name = "replicas.0", .generation = 3, .rank = rank, .size = size}, rendezvous, Soon());
      ASSERT_TRUE(group.ok()) << group.status();
      work(**group);
    });
  }
  for (std::thread& member : members) member.join();
}

TEST(GlooGroup, SumsGathersAndScatters) {
  WithMembers(3, [](Group& group) {
    EXPECT_EQ(group.transport(), "gloo");
    const auto rank = static_cast<float>(group.rank());
    at::Tensor tensor = at::full({4, 5}, rank + 1);
    ASSERT_TRUE(group.AllReduceSum(tensor, Soon()).ok());
    EXPECT_TRUE(at::equal(tensor, at::full({4, 5}, 6.0f)));

    at::Tensor gathered = at::empty({3, 2}, at::kBFloat16);
    ASSERT_TRUE(group.AllGather(at::full({2}, rank, at::kBFloat16), gathered, Soon()).ok());
    EXPECT_TRUE(at::equal(gathered.to(at::kFloat), at::tensor({0.f, 0.f, 1.f, 1.f, 2.f, 2.f}).view({3, 2})));

    at::Tensor slice = at::empty({2});
    ASSERT_TRUE(group.ReduceScatterSum(at::arange(6, at::kFloat), slice, Soon()).ok());
    EXPECT_TRUE(at::equal(slice, at::tensor({6 * rank, 6 * rank + 3})));
    ASSERT_TRUE(group.Barrier(Soon()).ok());
  });
}

TEST(GlooGroup, OrderedSumIsThePairwiseTreeBitForBit) {
  // Sizes at which the order shows in the bits, and more elements than one piece of 16 MiB holds.
  const int64_t count = (int64_t{16} << 20) / 4 + 1001;
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < 5; ++rank) {
    inputs.push_back(at::sin(at::arange(count, at::kFloat) * (1.7f + 0.3f * static_cast<float>(rank))) * std::pow(10.f, static_cast<float>(rank % 3)));
  }
  const at::Tensor expected = ((inputs[0] + inputs[1]) + (inputs[2] + inputs[3])) + inputs[4];
  ASSERT_FALSE(at::equal(expected, inputs[0] + inputs[1] + inputs[2] + inputs[3] + inputs[4])) << "the order must matter here";
  WithMembers(5, [&](Group& group) {
    at::Tensor tensor = inputs[static_cast<size_t>(group.rank())].clone();
    ASSERT_TRUE(group.AllReduceOrdered(tensor, Soon()).ok());
    EXPECT_TRUE(at::equal(tensor, expected));
  });
}

TEST(GlooGroup, RefusesShapesThatDoNotFitAndGoesOn) {
  WithMembers(2, [](Group& group) {
    at::Tensor wrong = at::empty({3, 2});
    const absl::Status status = group.AllGather(at::ones({2}), wrong, Soon());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("group replicas.0 of 2: all-gather of Float[2] into Float[3, 2]"));
    ASSERT_TRUE(group.Barrier(Soon()).ok());
  });
  InMemoryRendezvous rendezvous;
  EXPECT_EQ(MakeGlooGroup({.name = "x", .rank = 2, .size = 2}, &rendezvous, Soon()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(GlooGroup, AMemberThatDoesNotCallIsADeadlineAndTheGroupIsDead) {
  absl::Notification given_up;
  WithMembers(2, [&](Group& group) {
    at::Tensor tensor = at::ones({1000});
    if (group.rank() == 1) {
      given_up.WaitForNotification();
      return;
    }
    const absl::Status status = group.AllReduceSum(tensor, absl::Now() + absl::Milliseconds(50));
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("group replicas.0"));
    EXPECT_EQ(group.Barrier(Soon()).code(), absl::StatusCode::kDeadlineExceeded);
    given_up.Notify();
  });
}

TEST(GlooGroup, AbortWakesTheWaiterAndFreesTheGroup) {
  absl::Notification ended;
  WithMembers(2, [&](Group& group) {
    if (group.rank() == 1) {
      ended.WaitForNotification();
      return;
    }
    std::thread aborting([&] { group.Abort(absl::AbortedError("generation 4 begins")); });
    const absl::Status status = group.Barrier(absl::InfiniteFuture());
    EXPECT_EQ(status, absl::AbortedError("group replicas.0: generation 4 begins"));
    aborting.join();
    ended.Notify();
  });
}

TEST(GlooGroup, AMemberThatLeavesIsUnavailable) {
  WithMembers(2, [](Group& group) {
    ASSERT_TRUE(group.Barrier(Soon()).ok());
    if (group.rank() == 1) return;
    absl::Status status;
    while (status.ok()) status = group.Barrier(Soon());
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  });
}

TEST(GlooGroup, AMissingMemberEndsTheBuildingAtItsDeadline) {
  InMemoryRendezvous rendezvous;
  const absl::Status status =
      MakeGlooGroup({.name = "replicas.0", .rank = 0, .size = 2}, &rendezvous, absl::Now() + absl::Milliseconds(100)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  rendezvous.Close(absl::AbortedError("the plan is over"));
  EXPECT_EQ(MakeGlooGroup({.name = "replicas.0", .rank = 0, .size = 2}, &rendezvous, Soon()).status().code(),
            absl::StatusCode::kAborted);
}

TEST(StreamStore, KeepsKeysUnderItsPrefixAndWaitsToItsDeadline) {
  InMemoryRendezvous rendezvous;
  auto store = c10::make_intrusive<StreamStore>(&rendezvous, "group/3/x/", std::chrono::milliseconds(20));
  store->set("key", std::vector<uint8_t>{1, 0, 255});
  EXPECT_EQ(rendezvous.Get("group/3/x/key", absl::InfinitePast())->size(), 3u);
  EXPECT_EQ(store->clone()->get("key"), (std::vector<uint8_t>{1, 0, 255}));
  EXPECT_TRUE(store->check({"key"}));
  EXPECT_FALSE(store->check({"key", "other"}));
  store->wait({"key"});
  EXPECT_THROW(store->wait({"other"}), c10::DistStoreError);
  EXPECT_THROW(store->get("other"), c10::DistStoreError);
  EXPECT_THROW(store->add("key", 1), c10::NotImplementedError);
}

}  // namespace
}  // namespace moonpipe
