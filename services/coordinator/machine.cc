#include "services/coordinator/machine.h"

#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"

namespace moonpipe {

std::string CpuModel() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (absl::StartsWith(line, "model name")) return std::string(absl::StripAsciiWhitespace(line.substr(line.find(':') + 1)));
  }
  return "unknown";
}

}  // namespace moonpipe
