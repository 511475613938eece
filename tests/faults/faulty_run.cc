#include "tests/faults/faulty_run.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/spec/safetensors.h"

namespace moonpipe {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kLook = absl::Milliseconds(10);

std::string ReadWhole(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  return text.ok() ? *text : std::string();
}

std::string StepFolder(uint64_t step) { return absl::StrFormat("step-%08d", step); }

}  // namespace

std::string FreshFolder(const std::string& name) {
  // As the program writes it in its messages and its services' command lines.
  const std::string path =
      fs::path(absl::StrCat(testing::TempDir(), "/moonpipe_faults_", ::getpid(), "/", name)).lexically_normal().string();
  fs::remove_all(path);
  fs::create_directories(path);
  return path;
}

nlohmann::json TinyConfig() {
  nlohmann::json config = nlohmann::json::parse(ReadWhole(SOURCE_DIR "/examples/digits/model/config.json"));
  config["text_config"]["hidden_size"] = 48;
  config["text_config"]["intermediate_size"] = 64;
  config["text_config"]["moe_intermediate_size"] = 16;
  config["text_config"]["num_hidden_layers"] = 3;
  config["text_config"]["n_routed_experts"] = 4;
  config["vision_config"]["hidden_size"] = 48;
  config["vision_config"]["intermediate_size"] = 64;
  return config;
}

std::string WriteRun(const std::string& folder, const nlohmann::json& config, const std::string& more) {
  const std::string digits = SOURCE_DIR "/examples/digits";
  fs::create_directories(folder);
  EXPECT_TRUE(WriteFileAtomically(folder + "/config.json", config.dump(2)).ok());
  const std::string run_file = folder + "/run.yaml";
  std::ofstream(run_file) << "model: {config: config.json}\n"
                          << "data: {train: " << digits << "/train-000000.tar, tokenizer: " << digits << "/tokenizer}\n"
                          << "pipeline: {stages: 2, microbatches: 3, microbatch_tokens: 256}\n"
                          << "train: {steps: " << kSteps << ", seed: 11}\n"
                          << "optimizer: {learning_rate: 4e-3, schedule: {kind: cosine, warmup_steps: 2}}\n"
                          << "checkpoint: {every_steps: " << kEverySteps << ", keep_last: 3}\n"
                          << more;
  return run_file;
}

std::unique_ptr<Program> Program::Moonpipe(const std::vector<std::string>& arguments, const std::string& fault) {
  return Run("moonpipe", arguments, fault);
}

std::unique_ptr<Program> Program::Run(const std::string& program, const std::vector<std::string>& arguments, const std::string& fault) {
  static int number = 0;
  auto started = std::make_unique<Program>();
  started->folder_ = FreshFolder(absl::StrCat("program-", ++number));
  ProcessOptions options;
  options.name = program;
  options.arguments = {"/bin/sh",
                       "-c",
                       R"(out=$1; shift; exec "$@" > "$out/out" 2> "$out/err")",
                       "sh",
                       started->folder_,
                       absl::StrCat(BINARY_DIR, "/", program)};
  options.arguments.insert(options.arguments.end(), arguments.begin(), arguments.end());
  options.environment = {{"MOONPIPE_FAULT", fault}};
  absl::StatusOr<std::unique_ptr<ChildProcess>> child = ChildProcess::Start(options);
  EXPECT_TRUE(child.ok()) << child.status();
  if (!child.ok()) return nullptr;
  started->child_ = *std::move(child);
  return started;
}

ProcessExit Program::Wait(absl::Duration limit) {
  absl::StatusOr<ProcessExit> exit = child_->Wait(absl::Now() + limit);
  if (exit.ok()) return *exit;
  child_->Signal(SIGKILL);
  exit = child_->Wait(absl::InfiniteFuture());
  return *exit;
}

std::string Program::out() const { return ReadWhole(folder_ + "/out"); }
std::string Program::err() const { return ReadWhole(folder_ + "/err"); }

std::vector<std::string> Train(const std::string& run_file, const std::string& run_folder, std::vector<std::string> more) {
  std::vector<std::string> arguments = {"train", run_file, "--run-folder", run_folder};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::map<std::string, pid_t> ServicesOf(const std::string& run_folder) {
  std::map<std::string, pid_t> services;
  const std::string addresses = run_folder + "/addresses/";
  for (const auto& entry : fs::directory_iterator("/proc")) {
    pid_t pid = 0;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &pid)) continue;
    // One that has just ended has no command line any more.
    std::ifstream file(entry.path() / "cmdline");
    const std::string line((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const std::vector<std::string> arguments = absl::StrSplit(line, '\0');
    for (size_t i = 0; i + 1 < arguments.size(); ++i) {
      if (arguments[i] == "--address-file" && absl::StartsWith(arguments[i + 1], addresses)) {
        services[arguments[i + 1].substr(addresses.size())] = pid;
      }
    }
  }
  return services;
}

bool AllGone(const std::string& run_folder, absl::Duration limit) {
  const absl::Time deadline = absl::Now() + limit;
  while (!ServicesOf(run_folder).empty()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(kLook);
  }
  return true;
}

bool AwaitFault(const std::string& run_folder, const Program& program) {
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while (true) {
    // Asked first: what an ended program has written is there.
    const bool running = program.running();
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(run_folder + "/logs", none)) {
      if (absl::StrContains(ReadWhole(entry.path().string()), "] fault at ")) return true;
    }
    if (!running || absl::Now() > deadline) return false;
    absl::SleepFor(kLook);
  }
}

std::string LogOf(const std::string& run_folder, const std::string& service) {
  return ReadWhole(absl::StrCat(run_folder, "/logs/", service, ".log"));
}

std::vector<nlohmann::json> MetricsOf(const std::string& run_folder) {
  std::vector<nlohmann::json> lines;
  const std::string text = ReadWhole(run_folder + "/metrics.jsonl");
  for (const auto line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    lines.push_back(nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false));
    EXPECT_FALSE(lines.back().is_discarded()) << "torn line in " << run_folder << ": " << line;
  }
  return lines;
}

std::string CheckpointOf(const std::string& run_folder, uint64_t step) {
  return absl::StrCat(run_folder, "/checkpoints/", StepFolder(step));
}

std::vector<uint64_t> CheckpointsOf(const std::string& run_folder) {
  std::vector<uint64_t> steps;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(run_folder + "/checkpoints", none)) {
    uint64_t step = 0;
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(absl::StartsWith(name, "step-") && absl::SimpleAtoi(name.substr(5), &step)) << entry.path();
    steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::map<std::string, std::string> ShardsOf(const std::string& checkpoint) {
  std::map<std::string, std::string> shards;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(checkpoint, none)) {
    const std::string name = entry.path().filename().string();
    if (absl::EndsWith(name, ".safetensors")) shards[name] = ReadWhole(entry.path().string());
  }
  return shards;
}

std::map<std::string, std::string> TensorsOf(const std::string& checkpoint) {
  std::map<std::string, std::string> tensors;
  for (const auto& [name, bytes] : ShardsOf(checkpoint)) {
    const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(checkpoint + "/" + name);
    EXPECT_TRUE(file.ok()) << file.status();
    if (!file.ok()) continue;
    for (const StoredTensor& tensor : file->tensors()) {
      tensors[tensor.name] = std::string(static_cast<const char*>(tensor.data), tensor.num_bytes());
    }
  }
  return tensors;
}

void ExpectSameMetrics(const std::string& reference, const std::string& run) {
  std::map<uint64_t, nlohmann::json> known;
  for (const nlohmann::json& line : MetricsOf(reference)) known[line.at("step")] = line;
  ASSERT_EQ(known.size(), kSteps) << reference;
  uint64_t last = 0;
  for (const nlohmann::json& line : MetricsOf(run)) {
    last = line.at("step");
    for (const char* key : {"loss", "grad_norm", "learning_rate", "tokens", "trained_labels", "images", "samples", "model_flops"}) {
      EXPECT_EQ(line.at(key), known.at(last).at(key)) << key << " of step " << last << " in " << run;
    }
  }
  EXPECT_EQ(last, kSteps) << run;
}

void ExpectSameEnd(const std::string& reference, const std::string& run) {
  ExpectSameMetrics(reference, run);
  const auto expected = ShardsOf(CheckpointOf(reference, kSteps));
  const auto actual = ShardsOf(CheckpointOf(run, kSteps));
  ASSERT_FALSE(expected.empty()) << reference;
  for (const auto& [name, bytes] : expected) {
    ASSERT_TRUE(actual.contains(name)) << name << " is not in the last checkpoint of " << run;
    EXPECT_TRUE(actual.at(name) == bytes) << name << " has other bytes in " << run;
  }
  EXPECT_EQ(actual.size(), expected.size());
}

}  // namespace moonpipe
