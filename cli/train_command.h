// `moonpipe train` and `moonpipe eval`: a run on an embedded cluster from the first process to the last word.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace moonpipe {

// An id for a new run of this file: its name, or its folder's for run.yaml, and the time. `examples/digits/run.yaml` gives
// `digits-20261130-220000`.
std::string NewRunId(const std::string& run_file);

struct TrainArguments {
  std::string run_file;
  std::vector<std::string> overrides;  // as of --set
  std::string runs_folder = "runs";
  std::string run_folder;  // empty: a new one in runs_folder, named after the run file and the time
  std::string resume;      // empty: what the run file says
  bool json = false;
};

// Blocks until the run has ended. The error is the one message that a person needs.
absl::Status TrainCommand(const TrainArguments& arguments);

struct EvalArguments {
  std::string run_or_checkpoint;
  std::vector<std::string> files;  // one set each; empty: the sets of the run
  std::vector<std::string> overrides;
  bool json = false;
  bool print_answers = false;
};

absl::Status EvalCommand(const EvalArguments& arguments);

}  // namespace moonpipe
