// `moonpipe parity` notices each mistake that it is there to find (MOONPIPE_TEST_FAULT, moonpipe/model/test_faults.h).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/parity_runs.h"

namespace moonpipe {
namespace {

using ::testing::HasSubstr;

// Each fault and where it must show first.
struct Fault {
  const char* name;
  const char* fixture;
  const char* batch_case;
  const char* group;
};
class ParityFaultTest : public ::testing::TestWithParam<Fault> {};

TEST_P(ParityFaultTest, IsNoticed) {
  const Fault& fault = GetParam();
  const ProgramResult result =
      RunParity(FixtureFolder(fault.fixture), {"--case", fault.batch_case, "--stages", "1", "--set", "vision.placement=first_stage", "--json"}, fault.name);
  EXPECT_EQ(result.exit_code, 1) << result.out;
  EXPECT_THAT(result.err, HasSubstr("differ from their recording"));
  const nlohmann::json json = Parse(result);
  EXPECT_FALSE(json["passed"]);
  EXPECT_GT(Largest(json, fault.batch_case, fault.group), 3e-4);
}

INSTANTIATE_TEST_SUITE_P(Faults, ParityFaultTest,
                         ::testing::Values(Fault{"patch-pair-order", "kimi_vl_a3b", "two_images", "vision tower"},
                                           Fault{"erf-gelu", "kimi_vl_a3b", "two_images", "vision tower"},
                                           Fault{"no-mscale", "kimi_k2_5", "two_images", "layer 0"},
                                           Fault{"cubic-constant", "kimi_vl_a3b", "two_images", "vision tower"},
                                           Fault{"no-document-mask", "moonlight", "packed", "layer 0"}),
                         [](const auto& instance) {
                           std::string name = instance.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moonpipe
