// Runs `moonpipe train` on a tiny model and the digits, with faults, and looks at what is left: the processes, the messages, the files.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "moonpipe/runtime/process_launcher.h"
#include "nlohmann/json.hpp"

namespace moonpipe {

// Steps of a run, and after how many steps each of its checkpoints is written; the last step has one too.
inline constexpr uint64_t kSteps = 8;
inline constexpr uint64_t kEverySteps = 3;

// A folder below testing::TempDir() of this process, made empty.
std::string FreshFolder(const std::string& name);

// The configuration of the tiny model: three decoder layers, four experts, two blocks of the tower.
nlohmann::json TinyConfig();
// Writes config.json and run.yaml for two stages and an encoder into `folder`. Returns the run file. `more` are lines of YAML.
std::string WriteRun(const std::string& folder, const nlohmann::json& config = TinyConfig(), const std::string& more = "");

// A program that runs, its output in files.
class Program {
 public:
  // `moonpipe ARGUMENTS`, with MOONPIPE_FAULT if `fault` is not empty.
  static std::unique_ptr<Program> Moonpipe(const std::vector<std::string>& arguments, const std::string& fault = "");
  // Any program of this build.
  static std::unique_ptr<Program> Run(const std::string& program, const std::vector<std::string>& arguments,
                                      const std::string& fault = "");

  pid_t pid() const { return child_->pid(); }
  bool running() const { return child_->running(); }
  void Signal(int signal) { child_->Signal(signal); }
  // Waits for the end, at most `limit`; a program that goes on for longer is killed and has signal 9.
  ProcessExit Wait(absl::Duration limit = absl::Seconds(90));
  std::string out() const;
  std::string err() const;

 private:
  std::string folder_;
  std::unique_ptr<ChildProcess> child_;
};

// The arguments of `moonpipe train` into `run_folder`.
std::vector<std::string> Train(const std::string& run_file, const std::string& run_folder, std::vector<std::string> more = {});

// The services of the run that are alive, by name.
std::map<std::string, pid_t> ServicesOf(const std::string& run_folder);
// True once no service of the run is alive; false if some are after `limit`.
bool AllGone(const std::string& run_folder, absl::Duration limit = absl::Seconds(3));
// Waits until a service of the run says that the fault has come; false if the program ends before, or after a minute.
bool AwaitFault(const std::string& run_folder, const Program& program);

std::string LogOf(const std::string& run_folder, const std::string& service);
// The lines of metrics.jsonl.
std::vector<nlohmann::json> MetricsOf(const std::string& run_folder);
std::string CheckpointOf(const std::string& run_folder, uint64_t step);
// Steps of all checkpoints that are there, in order.
std::vector<uint64_t> CheckpointsOf(const std::string& run_folder);
// Every file of weights or optimizer state of a checkpoint: name to bytes.
std::map<std::string, std::string> ShardsOf(const std::string& checkpoint);
// Every tensor of these files: name to bytes.
std::map<std::string, std::string> TensorsOf(const std::string& checkpoint);

// Expects the same final shards and, in every line of `run`'s metrics, the numbers that `reference` has for that step.
void ExpectSameEnd(const std::string& reference, const std::string& run);
void ExpectSameMetrics(const std::string& reference, const std::string& run);

}  // namespace moonpipe
