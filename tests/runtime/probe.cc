// A program for the tests of the launcher and of main's first lines.
//   probe die-with-parent FILE   dies with its parent; writes FILE once it is sure to
//   probe wait-for-signal FILE   writes FILE, then exits with 5 at SIGTERM or SIGINT
//   probe print-environment      prints the pinned variables as main's static initialisers saw them, and how often main
//   ran
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "moonpipe/base/file.h"
#include "moonpipe/runtime/main_flags.h"
#include "moonpipe/runtime/process_launcher.h"

namespace {

std::string Seen(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "absent" : value;
}

// Read before main, as a library would.
const std::string before_main = Seen("MKL_CBWR") + " " + Seen("ATEN_CPU_CAPABILITY");

}  // namespace

int main(int argc, char** argv) {
  moonpipe::SetEnvironmentForDeterminism(argv);
  moonpipe::DieWithParent();
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "die-with-parent") {
    if (!moonpipe::WriteFileAtomically(argv[2], "ready").ok()) return 1;
    while (true) ::pause();
  }
  if (mode == "wait-for-signal") {
    moonpipe::ShutdownSignal shutdown;
    if (shutdown.Wait(absl::Milliseconds(1))) return 1;
    if (!moonpipe::WriteFileAtomically(argv[2], "ready").ok()) return 1;
    return shutdown.Wait() ? 5 : 1;
  }
  if (mode == "print-environment") {
    std::cout << before_main << " " << ::getpid();
    for (int i = 2; i < argc; ++i) std::cout << " " << argv[i];
    std::cout << std::endl;
    return 0;
  }
  return 2;
}
