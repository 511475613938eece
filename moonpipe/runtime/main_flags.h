// What every service's main has in common: flags, logging and an environment in which arithmetic is repeatable.
//
//   int main(int argc, char** argv) {
//     moonpipe::SetEnvironmentForDeterminism(argv);
//     moonpipe::DieWithParent();
//     moonpipe::ShutdownSignal shutdown;
//     CLI::App app("decoder stage of moonpipe");
//     ServiceFlags flags;
//     flags.AddTo(&app, ServiceFlags::Dials::kCoordinator);
//     CLI11_PARSE(app, argc, argv);
//     moonpipe::InitLogging("decoder", flags.format());
//     ...
//     MOONPIPE_RETURN_IF_ERROR(flags.WriteAddress(server->address()));
//     shutdown.Wait();
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "moonpipe/base/logging.h"

namespace CLI {
class App;
}

namespace moonpipe {

struct ServiceFlags {
  std::string coordinator;     // --coordinator HOST:PORT; only workers have it
  std::string listen;          // --listen
  std::string health_listen;   // --health-listen, empty for none
  std::string metrics_listen;  // --metrics-listen
  std::string address_file;    // --address-file, empty for none
  std::string advertise_host;  // --advertise-host, empty for the host of --listen
  bool insecure = false;       // --insecure
  std::string log_format;      // --log-format text|json

  enum class Dials { kNobody, kCoordinator };

  // Adds the flags to `app`. Every flag can also come from the environment, as MOONPIPE_LISTEN for --listen. With
  // kCoordinator,
  // --coordinator is there and required.
  void AddTo(CLI::App* app, Dials dials);

  LogFormat format() const { return log_format == "json" ? LogFormat::kJson : LogFormat::kText; }

  // The address that others dial: the port that was bound with --advertise-host, or else with the host that was
  // listened on. INVALID_ARGUMENT where that is a wildcard (0.0.0.0, ::), which nobody can dial.
  absl::StatusOr<std::string> AdvertisedAddress(const std::string& bound_address) const;

  // Writes the address to --address-file, atomically, for whoever waits for it (WaitForAddress); nothing without the
  // flag. Call it when the service is ready to be dialled.
  absl::Status WriteAddress(const std::string& address) const;
};

// SIGTERM and SIGINT as something to wait for. Make it before any thread starts: the signals are blocked in this thread
// and in those that it starts, so nothing but Wait takes them.
class ShutdownSignal {
 public:
  ShutdownSignal();
  // Blocks until one comes, or until `timeout` has passed; true for a signal.
  bool Wait(absl::Duration timeout = absl::InfiniteDuration());
};

// Pins the instruction set that MKL and LibTorch choose (MKL_CBWR=AVX2, ATEN_CPU_CAPABILITY=avx2), where the
// environment does not say otherwise: without it a small matrix product's bits depend on the alignment of memory. The
// libraries may read the variables in their static initialisers, before main, so where one is missing this process is
// started anew with it (execv of /proc/self/exe; same process number, arguments and open files). Call it at the first
// line of main, before any thread. Ends the process with a message where an x86-64 processor has no AVX2.
void SetEnvironmentForDeterminism(char** argv);

}  // namespace moonpipe
