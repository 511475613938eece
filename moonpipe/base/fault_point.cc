#include "moonpipe/base/fault_point.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "moonpipe/base/logging.h"

namespace moonpipe {
namespace {

constexpr char kVariable[] = "MOONPIPE_FAULT";
constexpr char kLauncher[] = "moonpipe";
constexpr absl::Duration kHoldTime = absl::Seconds(2);

struct NamedAction {
  const char* name;
  Fault::Action action;
};
constexpr NamedAction kActions[] = {{"kill", Fault::Action::kKill},
                                    {"kill-cluster", Fault::Action::kKillCluster},
                                    {"stop", Fault::Action::kStop},
                                    {"hold", Fault::Action::kHold},
                                    {"error", Fault::Action::kError}};

// The fault of this process, if it has one.
std::optional<Fault> ReadEnvironment() {
  const char* text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0') return std::nullopt;
  absl::StatusOr<Fault> fault = ParseFault(text);
  if (!fault.ok()) {
    MP_LOG(ERROR) << kVariable << ": " << fault.status().message();
    std::_Exit(2);
  }
  if (fault->service != ServiceName()) return std::nullopt;
  return *std::move(fault);
}

}  // namespace

absl::StatusOr<Fault> ParseFault(absl::string_view text) {
  const absl::Status expected = absl::InvalidArgumentError(
      absl::StrCat("\"", text, "\" is not of the form SERVICE:POINT@STEP[.MICROBATCH]=kill|kill-cluster|stop|hold|error"));
  Fault fault;
  const std::pair<absl::string_view, absl::string_view> service = absl::StrSplit(text, absl::MaxSplits(':', 1));
  const std::pair<absl::string_view, absl::string_view> point = absl::StrSplit(service.second, absl::MaxSplits('@', 1));
  const std::pair<absl::string_view, absl::string_view> number = absl::StrSplit(point.second, absl::MaxSplits('=', 1));
  const std::vector<absl::string_view> numbers = absl::StrSplit(number.first, '.');
  fault.service = std::string(service.first);
  fault.point = std::string(point.first);
  if (fault.service.empty() || fault.point.empty() || numbers.empty() || numbers.size() > 2) return expected;
  if (!absl::SimpleAtoi(numbers[0], &fault.step)) return expected;
  if (numbers.size() == 2 && (!absl::SimpleAtoi(numbers[1], &fault.microbatch) || fault.microbatch < 0)) return expected;
  for (const NamedAction& known : kActions) {
    if (number.second != known.name) continue;
    fault.action = known.action;
    return fault;
  }
  return expected;
}

absl::Status FaultPoint(absl::string_view point, uint64_t step, int64_t microbatch) {
  static const std::optional<Fault> fault = ReadEnvironment();
  if (!fault.has_value()) return absl::OkStatus();
  if (point != fault->point || step != fault->step) return absl::OkStatus();
  if (fault->microbatch >= 0 && microbatch != fault->microbatch) return absl::OkStatus();
  static std::atomic<bool> happened = false;
  if (happened.exchange(true)) return absl::OkStatus();
  MP_LOG(WARNING) << "fault at " << point << " of step " << step
                  << (microbatch >= 0 ? absl::StrCat(" microbatch ", microbatch) : "");
  switch (fault->action) {
    case Fault::Action::kKill:
      raise(SIGKILL);
      break;
    case Fault::Action::kKillCluster: {
      // Never a shell or an init.
      std::error_code error;
      const pid_t parent = getppid();
      if (std::filesystem::read_symlink(absl::StrCat("/proc/", parent, "/exe"), error).filename() == kLauncher) kill(parent, SIGKILL);
      raise(SIGKILL);
      break;
    }
    case Fault::Action::kStop:
      raise(SIGSTOP);
      break;
    case Fault::Action::kHold:
      absl::SleepFor(kHoldTime);
      break;
    case Fault::Action::kError:
      return absl::InternalError(absl::StrCat("fault at ", point, " of step ", step));
  }
  return absl::OkStatus();
}

}  // namespace moonpipe
