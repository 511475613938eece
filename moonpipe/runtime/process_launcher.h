// Child processes of the embedded cluster. posix_spawn, never fork: a fork after LibTorch's threads ran hangs.
//
//   MOONPIPE_ASSIGN_OR_RETURN(auto child, ChildProcess::Start({.name = "decoder-0", .arguments = {path,
//   "--address-file", file},
//                                                              .log_file = folder + "/decoder-0.log"}));
//   MOONPIPE_ASSIGN_OR_RETURN(std::string address, WaitForAddress(child.get(), file, absl::Seconds(30)));
//   ...
//   TerminateAll({child.get()}, absl::Seconds(5));
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace moonpipe {

struct ProcessOptions {
  // In messages, for example "decoder-0".
  std::string name;
  // The program (a path, or a name to find in PATH) and its arguments.
  std::vector<std::string> arguments = {};
  // Added to this process's environment; a variable that is there already is replaced.
  std::vector<std::pair<std::string, std::string>> environment = {};
  // Gets standard output and error, appended. Empty: they are those of this process.
  std::string log_file = "";
  // A process group of its own, so that Ctrl-C on the terminal reaches only the parent, which then stops its children
  // in order.
  bool own_process_group = true;
};

// How a process ended.
struct ProcessExit {
  int exit_code = 0;  // Where it exited by itself.
  int signal = 0;     // Where a signal ended it; 0 otherwise.

  bool ok() const { return exit_code == 0 && signal == 0; }
  // `exited with code 3`, `was killed by signal 9 (Killed)`.
  std::string ToString() const;
};

class ChildProcess {
 public:
  // On a thread that outlives the child, if that calls DieWithParent. NOT_FOUND where the program does not exist,
  // INTERNAL with the system's reason otherwise. Blocks until the program runs.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const ProcessOptions& options);

  // Kills the process if it still runs, and waits for its end.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  const std::string& name() const { return name_; }
  pid_t pid() const { return pid_; }
  const std::string& log_file() const { return log_file_; }

  // Sends a signal; nothing happens once the process has ended (its number may belong to another by then).
  void Signal(int signal);

  bool running() const;
  // How it ended; DEADLINE_EXCEEDED where it still runs at `deadline`.
  absl::StatusOr<ProcessExit> Wait(absl::Time deadline);

  // Calls `on_exit` once, on a thread of this object, when the process ends; at once where it has ended. It must not
  // destroy the object. Only one at a time.
  void OnExit(std::function<void(const ProcessExit&)> on_exit);

  // The last `lines` lines of the log; empty without a log file.
  std::string LogTail(int lines = 20) const;

 private:
  explicit ChildProcess(const ProcessOptions& options) : name_(options.name), log_file_(options.log_file) {}
  void WatchForExit();

  const std::string name_;
  const std::string log_file_;
  pid_t pid_ = -1;
  mutable absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  ProcessExit exit_ ABSL_GUARDED_BY(mutex_);
  std::function<void(const ProcessExit&)> on_exit_ ABSL_GUARDED_BY(mutex_);
  std::thread watcher_;
};

// A service writes its address to the file of --address-file once it is ready, atomically; this waits for it. Remove an
// old file before the start. UNAVAILABLE with exit status and the end of the log where the process ends first,
// DEADLINE_EXCEEDED with the same log where it takes longer than `timeout`.
absl::StatusOr<std::string> WaitForAddress(ChildProcess* process, const std::string& address_file,
                                           absl::Duration timeout);

// SIGTERM to all, then SIGKILL to those that run after `grace`. Returns when all have ended: the names of those that
// were killed.
std::vector<std::string> TerminateAll(const std::vector<ChildProcess*>& processes, absl::Duration grace);

// In a child, as early in main as can be: the kernel sends SIGKILL when the parent ends, so that no service outlives a
// launcher that was killed. Ends this process at once where the parent is gone already. The launcher passes its number
// in kParentPidVariable; without that variable a service runs on its own and nothing happens. The kernel means the
// thread that started the child: start children on a thread that lives as long as the launcher, such as main's.
inline constexpr char kParentPidVariable[] = "MOONPIPE_PARENT_PID";
void DieWithParent();

}  // namespace moonpipe
