#include "moonpipe/data/packer.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/data/keyed_permutation.h"

namespace moonpipe {
namespace {

using testing::ElementsAre;

TEST(KeyedPermutation, HasEveryElementOnceForAnySize) {
  for (const uint64_t size : {1, 2, 3, 4, 5, 16, 17, 64, 65, 1000, 3397}) {
    const KeyedPermutation order(size, 7, 3);
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < size; ++i) seen.insert(order.At(i));
    EXPECT_EQ(seen.size(), size);
    EXPECT_EQ(*seen.rbegin(), size - 1);
  }
}

TEST(KeyedPermutation, DependsOnSeedAndEpochAndOnNothingElse) {
  const auto take = [](uint64_t seed, uint64_t epoch) {
    std::vector<uint64_t> order;
    for (uint64_t i = 0; i < 100; ++i) order.push_back(KeyedPermutation(100, seed, epoch).At(i));
    return order;
  };
  EXPECT_EQ(take(1, 2), take(1, 2));
  EXPECT_NE(take(1, 2), take(2, 2));
  EXPECT_NE(take(1, 2), take(1, 3));
  EXPECT_NE(take(1, 2), take(2, 1)) << "seed and epoch are not interchangeable";
}

TEST(KeyedPermutation, ShufflesWell) {
  // Over 400 epochs of 10 elements, each element stands at each place about 40 times (deviation 6).
  std::vector<std::vector<int>> counts(10, std::vector<int>(10));
  for (uint64_t epoch = 0; epoch < 400; ++epoch) {
    const KeyedPermutation order(10, 0, epoch);
    for (uint64_t i = 0; i < 10; ++i) ++counts[i][order.At(i)];
  }
  for (const std::vector<int>& row : counts) {
    for (const int count : row) {
      EXPECT_GT(count, 15);
      EXPECT_LT(count, 70);
    }
  }
}

TEST(KeyedPermutation, IsTheSameOnEveryMachine) {
  std::vector<uint64_t> order;
  for (uint64_t i = 0; i < 8; ++i) order.push_back(KeyedPermutation(8, 1, 0).At(i));
  EXPECT_THAT(order, ElementsAre(1, 4, 7, 0, 6, 3, 5, 2));
}

TEST(PackDocuments, FillsPacksEvenlyUnderTheLimit) {
  // 40 tokens need two packs of at most 30; they get 20 each.
  EXPECT_THAT(PackDocuments({10, 10, 10, 10}, 30), ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3)));
}

TEST(PackDocuments, TakesTheFewestPacksWhereEvenFillingWouldOverflow) {
  // Evenly: 6, then 5, then 4 to the second, 3 to the first, 2 to the first or second... 20 tokens in two packs of 10 exactly.
  const auto packs = PackDocuments({6, 4, 5, 3, 2}, 10);
  ASSERT_EQ(packs.size(), 2u);
  EXPECT_THAT(packs, ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3, 4)));
}

TEST(PackDocuments, HoldsItsPromisesOnManyLengths) {
  uint64_t state = 1;
  for (int round = 0; round < 300; ++round) {
    std::vector<uint32_t> lengths(1 + state % 60);
    for (uint32_t& length : lengths) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      length = 1 + static_cast<uint32_t>((state >> 33) % 50);
    }
    const uint32_t limit = 50 + static_cast<uint32_t>((state >> 40) % 100);
    const auto packs = PackDocuments(lengths, limit);
    std::vector<int> seen(lengths.size());
    size_t previous_first = 0;
    for (const auto& pack : packs) {
      ASSERT_FALSE(pack.empty());
      EXPECT_TRUE(std::is_sorted(pack.begin(), pack.end()));
      EXPECT_GE(pack.front(), previous_first);
      previous_first = pack.front();
      uint32_t tokens = 0;
      for (const size_t document : pack) {
        tokens += lengths[document];
        ++seen[document];
      }
      EXPECT_LE(tokens, limit);
    }
    EXPECT_THAT(seen, testing::Each(1));
    const uint64_t total = std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
    EXPECT_LE(packs.size(), total / limit * 2 + 2) << "two packs that are both at most half full would be one";
  }
}

TEST(PackDocuments, OfNothingIsNothing) { EXPECT_TRUE(PackDocuments({}, 10).empty()); }

}  // namespace
}  // namespace moonpipe
