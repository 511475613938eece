// Runs the programs as a person would, on a tiny model and the digits, and reads what they leave behind.
//
//   const TinyRun run = WriteTinyRun("ties", TinyTiedConfig());
//   const TrainResult one = RunTrain(run, "one", {"pipeline.stages=1"});
//   ASSERT_EQ(one.exit_code, 0) << one.err;
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"

namespace moonpipe {

// A folder below testing::TempDir() of this process, made empty.
std::string FreshFolder(const std::string& name);

struct TinyRun {
  std::string folder;
  std::string run_file;
};
// Writes config.json and run.yaml: six steps of four microbatches of 256 tokens, two stages, every deadline long enough for a
// machine that does other work too. `train` are the training files; by default the first shard of the digits.
TinyRun WriteTinyRun(const std::string& name, const nlohmann::json& config, const std::vector<std::string>& train = {});

struct ProgramResult {
  int exit_code = -1;  // -1: did not end by itself
  std::string out;
  std::string err;
};
// Runs BINARY_DIR/`program` to its end, at most two minutes.
ProgramResult RunProgram(const std::string& program, const std::vector<std::string>& arguments,
                         const std::vector<std::pair<std::string, std::string>>& environment = {});

struct TrainResult : ProgramResult {
  std::string run_folder;
  std::vector<nlohmann::json> metrics;  // lines of metrics.jsonl
  nlohmann::json report;                // report.json; null where there is none
};
// `moonpipe train` into the folder run-`id` of the run's folder; each of `overrides` is a --set.
TrainResult RunTrain(const TinyRun& run, const std::string& id, const std::vector<std::string>& overrides);

// The folder of the newest checkpoint.
std::string NewestCheckpoint(const std::string& run_folder);
// Every tensor of the checkpoint's files that begin with `kind` ("model" or "optimizer"), name to bytes.
std::map<std::string, std::string> ReadTensors(const std::string& checkpoint, const std::string& kind);

// The body of an HTTP page; empty where nobody answers.
std::string FetchPage(const std::string& address, const std::string& path);

}  // namespace moonpipe
