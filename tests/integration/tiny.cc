#include "tests/integration/tiny.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/runtime/process_launcher.h"
#include "moonpipe/spec/safetensors.h"

namespace moonpipe {
namespace {

constexpr absl::Duration kLongestRun = absl::Minutes(2);

std::string ReadWhole(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  return text.ok() ? *text : std::string();
}

}  // namespace

std::string FreshFolder(const std::string& name) {
  const std::string path =
      std::filesystem::path(absl::StrCat(testing::TempDir(), "/moonpipe_integration_", ::getpid(), "/", name)).lexically_normal().string();
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

TinyRun WriteTinyRun(const std::string& name, const nlohmann::json& config, const std::vector<std::string>& train) {
  TinyRun run;
  run.folder = FreshFolder(name);
  run.run_file = run.folder + "/run.yaml";
  const std::string digits = SOURCE_DIR "/examples/digits";
  const std::vector<std::string> files = train.empty() ? std::vector<std::string>{digits + "/train-000000.tar"} : train;
  EXPECT_TRUE(WriteFileAtomically(run.folder + "/config.json", config.dump(2)).ok());
  std::ofstream(run.run_file) << "model: {config: config.json}\n"
                              << "data: {train: [" << absl::StrJoin(files, ", ") << "], tokenizer: " << digits << "/tokenizer}\n"
                              << "pipeline: {stages: 2, microbatches: 4, microbatch_tokens: 256}\n"
                              << "train: {steps: 6, seed: 7}\n"
                              << "optimizer: {learning_rate: 4e-3, schedule: {kind: cosine, warmup_steps: 1}}\n"
                              << "runtime: {step_timeout_seconds: 60, heartbeat_timeout_seconds: 60}\n";
  return run;
}

ProgramResult RunProgram(const std::string& program, const std::vector<std::string>& arguments,
                         const std::vector<std::pair<std::string, std::string>>& environment) {
  static int number = 0;
  const std::string folder = FreshFolder(absl::StrCat("program-", ++number));
  ProcessOptions options;
  options.name = program;
  options.arguments = {"/bin/sh", "-c", R"(out=$1; err=$2; shift 2; exec "$@" > "$out" 2> "$err")", "sh", folder + "/out", folder + "/err",
                       absl::StrCat(BINARY_DIR, "/", program)};
  options.arguments.insert(options.arguments.end(), arguments.begin(), arguments.end());
  options.environment = environment;
  ProgramResult result;
  absl::StatusOr<std::unique_ptr<ChildProcess>> child = ChildProcess::Start(options);
  if (!child.ok()) {
    result.err = std::string(child.status().message());
    return result;
  }
  const absl::StatusOr<ProcessExit> exit = (*child)->Wait(absl::Now() + kLongestRun);
  if (exit.ok() && exit->signal == 0) result.exit_code = exit->exit_code;
  result.out = ReadWhole(folder + "/out");
  result.err = ReadWhole(folder + "/err");
  if (!exit.ok()) absl::StrAppend(&result.err, "\n", exit.status().message());
  return result;
}

TrainResult RunTrain(const TinyRun& run, const std::string& id, const std::vector<std::string>& overrides) {
  TrainResult result;
  result.run_folder = absl::StrCat(run.folder, "/run-", id);
  std::vector<std::string> arguments = {"train", run.run_file, "--run-folder", result.run_folder, "--log-format", "json"};
  for (const std::string& override_text : overrides) arguments.insert(arguments.end(), {"--set", override_text});
  static_cast<ProgramResult&>(result) = RunProgram("moonpipe", arguments);
  for (const auto line : absl::StrSplit(ReadWhole(result.run_folder + "/metrics.jsonl"), '\n', absl::SkipEmpty())) {
    result.metrics.push_back(nlohmann::json::parse(line));
  }
  const std::string report = ReadWhole(result.run_folder + "/report.json");
  if (!report.empty()) result.report = nlohmann::json::parse(report);
  return result;
}

std::string NewestCheckpoint(const std::string& run_folder) {
  std::string newest;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(run_folder + "/checkpoints", none)) {
    newest = std::max(newest, entry.path().string());
  }
  return newest;
}

std::map<std::string, std::string> ReadTensors(const std::string& checkpoint, const std::string& kind) {
  std::map<std::string, std::string> tensors;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint, none)) {
    const std::string name = entry.path().filename().string();
    if (!absl::StartsWith(name, kind) || !absl::EndsWith(name, ".safetensors")) continue;
    const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(entry.path().string());
    EXPECT_TRUE(file.ok()) << file.status();
    if (!file.ok()) continue;
    for (const StoredTensor& tensor : file->tensors()) {
      const bool first = tensors.emplace(tensor.name, std::string(static_cast<const char*>(tensor.data), tensor.num_bytes())).second;
      EXPECT_TRUE(first) << tensor.name << " is in two files of " << checkpoint;
    }
  }
  return tensors;
}

std::string FetchPage(const std::string& address, const std::string& path) {
  const std::pair<std::string, std::string> host_port = absl::StrSplit(address, ':');
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(host_port.first.c_str(), host_port.second.c_str(), &hints, &found) != 0) return "";
  const int fd = ::socket(found->ai_family, found->ai_socktype, 0);
  std::string answer;
  if (::connect(fd, found->ai_addr, found->ai_addrlen) == 0) {
    const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: ", host_port.first, "\r\n\r\n");
    if (::send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size())) {
      char buffer[4096];
      for (ssize_t n; (n = ::recv(fd, buffer, sizeof(buffer), 0)) > 0;) answer.append(buffer, static_cast<size_t>(n));
    }
  }
  ::close(fd);
  ::freeaddrinfo(found);
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "" : answer.substr(body + 4);
}

}  // namespace moonpipe
