// Runs `moonpipe parity` on the recordings below tests/fixtures.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/tiny.h"

namespace moonpipe {

inline std::string FixtureFolder(const std::string& name) { return std::string(SOURCE_DIR) + "/tests/fixtures/" + name; }

inline ProgramResult RunParity(const std::string& folder, std::vector<std::string> arguments, const std::string& fault = "") {
  arguments.insert(arguments.begin(), {"parity", folder});
  std::vector<std::pair<std::string, std::string>> environment;
  if (!fault.empty()) environment.emplace_back("MOONPIPE_TEST_FAULT", fault);
  return RunProgram("moonpipe", arguments, environment);
}

inline nlohmann::json Parse(const ProgramResult& result) {
  const nlohmann::json json = nlohmann::json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(json.is_discarded()) << result.out << result.err;
  return json;
}

// The largest difference of a group of a case.
inline double Largest(const nlohmann::json& result, const std::string& batch_case, const std::string& group) {
  for (const auto& one : result["cases"]) {
    if (one["case"] != batch_case) continue;
    for (const auto& entry : one["groups"]) {
      if (entry["name"] == group) return entry["largest_difference"];
    }
  }
  ADD_FAILURE() << "no group " << group << " in case " << batch_case;
  return -1;
}

// Runs all cases, or those that the arguments name, and expects that they are `cases` and agree.
inline void ExpectAgreement(const std::string& fixture, const std::vector<std::string>& cases, std::vector<std::string> arguments) {
  arguments.push_back("--json");
  const ProgramResult result = RunParity(FixtureFolder(fixture), arguments);
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  const nlohmann::json json = Parse(result);
  EXPECT_TRUE(json["passed"]);
  std::vector<std::string> seen;
  for (const auto& one : json["cases"]) {
    seen.push_back(one["case"]);
    EXPECT_EQ(one["failures"].size(), 0u);
    EXPECT_GT(one["groups"].size(), 10u);
  }
  EXPECT_EQ(seen, cases);
}

}  // namespace moonpipe
