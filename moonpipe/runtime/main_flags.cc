#include "moonpipe/runtime/main_flags.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/time/clock.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/listen_address.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

constexpr std::pair<const char*, const char*> kPinned[] = {{"MKL_CBWR", "AVX2"}, {"ATEN_CPU_CAPABILITY", "avx2"}};

// Names an address that cannot be parsed while the flags are read, not when it is used.
const CLI::Validator& IsAddress() {
  static const auto* validator = new CLI::Validator(
      [](std::string& text) { return std::string(ParseHostPort(text).status().message()); }, "HOST:PORT", "address");
  return *validator;
}

sigset_t ShutdownSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

}  // namespace

void ServiceFlags::AddTo(CLI::App* app, Dials dials) {
  if (dials == Dials::kCoordinator) {
    app->add_option("--coordinator", coordinator, "Address of the coordinator")
        ->required()
        ->check(IsAddress())
        ->envname("MOONPIPE_COORDINATOR");
  }
  listen = "127.0.0.1:0";
  metrics_listen = "127.0.0.1:0";
  log_format = "text";
  app->add_option("--listen", listen, "Address to serve gRPC on; port 0 for any free one")
      ->check(IsAddress())
      ->envname("MOONPIPE_LISTEN")
      ->capture_default_str();
  app->add_option("--health-listen", health_listen, "Address of a second, plain-text port with Health alone")
      ->check(IsAddress())
      ->envname("MOONPIPE_HEALTH_LISTEN");
  app->add_option("--metrics-listen", metrics_listen, "Address to serve /metrics on; port 0 for any free one")
      ->check(IsAddress())
      ->envname("MOONPIPE_METRICS_LISTEN")
      ->capture_default_str();
  app->add_option("--address-file", address_file, "File that gets the address once the service is ready")
      ->envname("MOONPIPE_ADDRESS_FILE");
  app->add_option("--advertise-host", advertise_host, "Host by which others reach this service")
      ->envname("MOONPIPE_ADVERTISE_HOST");
  app->add_flag("--insecure", insecure, "Allow plain text beyond this machine")->envname("MOONPIPE_INSECURE");
  app->add_option("--log-format", log_format, "Form of log lines")
      ->check(CLI::IsMember({"text", "json"}))
      ->envname("MOONPIPE_LOG_FORMAT")
      ->capture_default_str();
}

absl::StatusOr<std::string> ServiceFlags::AdvertisedAddress(const std::string& bound_address) const {
  MOONPIPE_ASSIGN_OR_RETURN(const HostPort bound, ParseHostPort(bound_address));
  if (!advertise_host.empty()) return FormatHostPort(advertise_host, bound.port);
  if (bound.host == "0.0.0.0" || bound.host == "::") {
    return absl::InvalidArgumentError(
        "--listen " + bound_address +
        " is every address of this machine; say with --advertise-host by which one others reach it");
  }
  return bound_address;
}

absl::Status ServiceFlags::WriteAddress(const std::string& address) const {
  if (address_file.empty()) return absl::OkStatus();
  return WriteFileAtomically(address_file, address + "\n");
}

ShutdownSignal::ShutdownSignal() {
  const sigset_t signals = ShutdownSignals();
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

bool ShutdownSignal::Wait(absl::Duration timeout) {
  const sigset_t signals = ShutdownSignals();
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    // An endless wait is a row of long ones.
    const absl::Duration left = std::min(deadline - absl::Now(), absl::Hours(1));
    const timespec wait = absl::ToTimespec(std::max(left, absl::ZeroDuration()));
    if (::sigtimedwait(&signals, nullptr, &wait) > 0) return true;
    if (absl::Now() >= deadline) return false;
  }
}

void SetEnvironmentForDeterminism(char** argv) {
#if defined(__x86_64__)
  // What row_kernels.cc is compiled for.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    std::fputs("moonpipe: this processor has no AVX2 and FMA, which the x86-64 build needs (any since 2013 to 2015 has): use another machine\n",
               stderr);
    std::_Exit(1);
  }
#endif
  bool complete = true;
  for (const auto& [name, value] : kPinned) {
    if (std::getenv(name) != nullptr) continue;
    complete = false;
    ::setenv(name, value, /*overwrite=*/0);
  }
  if (complete) return;
  // By its path: executed as /proc/self/exe, it would be called `exe` in every list of processes.
  char path[PATH_MAX + 1] = {};
  if (::readlink("/proc/self/exe", path, PATH_MAX) > 0) ::execv(path, argv);
  ::execv("/proc/self/exe", argv);
  // Without /proc the variables are at least set for all that reads them later.
}

}  // namespace moonpipe
