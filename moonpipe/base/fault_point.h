// Named places in the services where the tests of faults end, stop or fail a process. Inert, at the cost of one comparison, unless the
// environment variable MOONPIPE_FAULT names one:
//
//   MOONPIPE_FAULT="decoder-stage-1:forward@3.2=stop"   SERVICE:POINT@STEP[.MICROBATCH]=ACTION
//
// SERVICE is the name that InitLogging was given, so one variable in the launcher's environment reaches one service only. Without a
// microbatch the first one counts. A fault happens once in the life of a process, and the log says so first.
//
// Points: coordinator before_run_step, after_run_step, before_journal, after_journal, after_commit, before_manifest, before_rename,
// after_rename; computing workers forward, backward, commit, save; shard_half (in the middle of a safetensors file; STEP counts the
// files that the process has written, from 1); dataloader make_step.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moonpipe {

struct Fault {
  enum class Action {
    kKill,         // SIGKILL to this process
    kKillCluster,  // SIGKILL to the launcher, with which every process that it started dies, and to this process
    kStop,         // SIGSTOP to this process
    kHold,         // the thread sleeps for two seconds; the rest of the process goes on
    kError,        // FaultPoint returns INTERNAL
  };
  std::string service;
  std::string point;
  uint64_t step = 0;
  int64_t microbatch = -1;  // any
  Action action = Action::kKill;
};

// INVALID_ARGUMENT with the form that was expected.
absl::StatusOr<Fault> ParseFault(absl::string_view text);

// Does what MOONPIPE_FAULT says for this place. OK unless the action is an error. A variable that cannot be parsed ends the process:
// a fault that silently never happens would let a test pass.
absl::Status FaultPoint(absl::string_view point, uint64_t step, int64_t microbatch = -1);

}  // namespace moonpipe
