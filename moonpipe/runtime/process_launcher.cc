#include "moonpipe/runtime/process_launcher.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "moonpipe/base/file.h"

extern char** environ;

namespace moonpipe {
namespace {

constexpr absl::Duration kAddressPoll = absl::Milliseconds(5);
// Enough for the last lines of any log.
constexpr off_t kLogTailBytes = 16 << 10;

// The environment of a child as NAME=VALUE.
std::vector<std::string> ChildEnvironment(const std::vector<std::pair<std::string, std::string>>& additions) {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::pair<std::string, std::string> variable = absl::StrSplit(*entry, absl::MaxSplits('=', 1));
    variables[variable.first] = variable.second;
  }
  variables[kParentPidVariable] = absl::StrCat(::getpid());
  for (const auto& [name, value] : additions) variables[name] = value;
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(absl::StrCat(name, "=", value));
  return entries;
}

std::vector<char*> Pointers(std::vector<std::string>* strings) {
  std::vector<char*> pointers;
  for (std::string& text : *strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

class SpawnSettings {
 public:
  explicit SpawnSettings(const ProcessOptions& options) {
    posix_spawn_file_actions_init(&actions_);
    posix_spawnattr_init(&attributes_);
    posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    if (!options.log_file.empty()) {
      posix_spawn_file_actions_addopen(&actions_, STDOUT_FILENO, options.log_file.c_str(),
                                       O_WRONLY | O_CREAT | O_APPEND, 0644);
      posix_spawn_file_actions_adddup2(&actions_, STDOUT_FILENO, STDERR_FILENO);
    }
    // A signal that the parent blocks or ignores would be so in the child as well.
    sigset_t all, none;
    sigfillset(&all);
    sigemptyset(&none);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setsigmask(&attributes_, &none);
    short flags = POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK;
    if (options.own_process_group) {
      posix_spawnattr_setpgroup(&attributes_, 0);
      flags |= POSIX_SPAWN_SETPGROUP;
    }
    posix_spawnattr_setflags(&attributes_, flags);
  }
  ~SpawnSettings() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;
  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

ProcessExit FromWaitStatus(int status) {
  ProcessExit exit;
  if (WIFSIGNALED(status)) {
    exit.signal = WTERMSIG(status);
  } else {
    exit.exit_code = WEXITSTATUS(status);
  }
  return exit;
}

// What a person needs to see of a child that failed: the end of its log, or where to look.
std::string LogNote(const ChildProcess& process) {
  if (process.log_file().empty()) return "; its output is above";
  const std::string tail = process.LogTail();
  if (tail.empty()) return absl::StrCat("; its log ", process.log_file(), " is empty");
  return absl::StrCat("; the end of its log ", process.log_file(), ":\n", tail);
}

}  // namespace

std::string ProcessExit::ToString() const {
  if (signal != 0) return absl::StrCat("was killed by signal ", signal, " (", ::strsignal(signal), ")");
  return absl::StrCat("exited with code ", exit_code);
}

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(const ProcessOptions& options) {
  if (options.arguments.empty())
    return absl::InvalidArgumentError(absl::StrCat("no program is given for ", options.name));
  std::vector<std::string> arguments = options.arguments;
  std::vector<std::string> environment = ChildEnvironment(options.environment);
  const SpawnSettings settings(options);
  std::unique_ptr<ChildProcess> process(new ChildProcess(options));
  const int error = ::posix_spawnp(&process->pid_, arguments[0].c_str(), settings.actions(), settings.attributes(),
                                   Pointers(&arguments).data(), Pointers(&environment).data());
  if (error != 0) {
    process->pid_ = -1;
    std::string message = absl::StrCat("cannot start ", options.name, " (", arguments[0], "): ", std::strerror(error));
    if (!options.log_file.empty()) absl::StrAppend(&message, "; its log is ", options.log_file);
    return error == ENOENT ? absl::NotFoundError(message) : absl::InternalError(message);
  }
  process->watcher_ = std::thread([raw = process.get()] { raw->WatchForExit(); });
  return process;
}

ChildProcess::~ChildProcess() {
  if (pid_ < 0) return;
  Signal(SIGKILL);
  watcher_.join();
}

void ChildProcess::WatchForExit() {
  // First without reaping: until the state below says that it has ended, the number must stay this process's own.
  siginfo_t info;
  while (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) != 0 && errno == EINTR) {
  }
  std::function<void(const ProcessExit&)> on_exit;
  ProcessExit exit;
  {
    absl::MutexLock lock(&mutex_);
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    ended_ = true;
    exit_ = exit = FromWaitStatus(status);
    on_exit = std::exchange(on_exit_, nullptr);
  }
  if (on_exit != nullptr) on_exit(exit);
}

void ChildProcess::Signal(int signal) {
  absl::MutexLock lock(&mutex_);
  if (!ended_) ::kill(pid_, signal);
}

bool ChildProcess::running() const {
  absl::MutexLock lock(&mutex_);
  return !ended_;
}

absl::StatusOr<ProcessExit> ChildProcess::Wait(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithDeadline(absl::Condition(&ended_), deadline)) {
    return absl::DeadlineExceededError(absl::StrCat(name_, " (process ", pid_, ") still runs"));
  }
  return exit_;
}

void ChildProcess::OnExit(std::function<void(const ProcessExit&)> on_exit) {
  ProcessExit exit;
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_) {
      on_exit_ = std::move(on_exit);
      return;
    }
    exit = exit_;
  }
  if (on_exit != nullptr) on_exit(exit);
}

std::string ChildProcess::LogTail(int lines) const {
  if (log_file_.empty()) return "";
  const int fd = ::open(log_file_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return "";
  const off_t size = ::lseek(fd, 0, SEEK_END);
  const off_t begin = std::max<off_t>(0, size - kLogTailBytes);
  std::string text(static_cast<size_t>(size - begin), '\0');
  const ssize_t n = ::pread(fd, text.data(), text.size(), begin);
  ::close(fd);
  text.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
  std::vector<std::string> all = absl::StrSplit(absl::StripTrailingAsciiWhitespace(text), '\n');
  const size_t first = all.size() - std::min(all.size(), static_cast<size_t>(lines));
  return absl::StrJoin(all.begin() + static_cast<ptrdiff_t>(first), all.end(), "\n");
}

absl::StatusOr<std::string> WaitForAddress(ChildProcess* process, const std::string& address_file,
                                           absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    // Asked before the file is read: a process that wrote its address and ended at once has ended.
    const bool ended = !process->running();
    if (ended) {
      const absl::StatusOr<ProcessExit> exit = process->Wait(absl::InfiniteFuture());
      return absl::UnavailableError(
          absl::StrCat(process->name(), " ", exit->ToString(), " before it was ready", LogNote(*process)));
    }
    const absl::StatusOr<std::string> address = ReadFile(address_file);
    if (address.ok()) return std::string(absl::StripAsciiWhitespace(*address));
    const absl::Time now = absl::Now();
    if (now >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(process->name(), " was not ready within ", absl::FormatDuration(timeout), LogNote(*process)));
    }
    // Wakes at once when the process ends.
    (void)process->Wait(std::min(deadline, now + kAddressPoll));
  }
}

std::vector<std::string> TerminateAll(const std::vector<ChildProcess*>& processes, absl::Duration grace) {
  const absl::Time deadline = absl::Now() + grace;
  for (ChildProcess* process : processes) process->Signal(SIGTERM);
  std::vector<std::string> killed;
  for (ChildProcess* process : processes) {
    if (process->Wait(deadline).ok()) continue;
    killed.push_back(process->name());
    process->Signal(SIGKILL);
    (void)process->Wait(absl::InfiniteFuture());
  }
  return killed;
}

void DieWithParent() {
  const char* variable = std::getenv(kParentPidVariable);
  pid_t parent = 0;
  if (variable == nullptr || !absl::SimpleAtoi(variable, &parent)) return;
  // What this process starts in turn has another parent.
  ::unsetenv(kParentPidVariable);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have ended before the call above; then nobody would send the signal.
  if (::getppid() != parent) ::_exit(1);
}

}  // namespace moonpipe
