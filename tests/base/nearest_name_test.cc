#include "moonpipe/base/nearest_name.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moonpipe {
namespace {

TEST(NearestNames, FindsTheTypo) {
  EXPECT_THAT(NearestNames("stagse", {"steps", "stages", "schedule"}), testing::ElementsAre("stages"));
}

TEST(NearestNames, KeepsSilentWhenNothingIsNear) {
  EXPECT_THAT(NearestNames("zzzz", {"steps", "stages"}), testing::IsEmpty());
}

}  // namespace
}  // namespace moonpipe
