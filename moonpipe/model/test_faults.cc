#include "moonpipe/model/test_faults.h"

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "moonpipe/base/logging.h"

namespace moonpipe {
namespace {

constexpr char kVariable[] = "MOONPIPE_TEST_FAULT";
constexpr std::pair<const char*, TestFault> kFaults[] = {{"patch-pair-order", TestFault::kPatchPairOrder},
                                                         {"erf-gelu", TestFault::kErfGelu},
                                                         {"no-mscale", TestFault::kNoMscale},
                                                         {"cubic-constant", TestFault::kCubicConstant},
                                                         {"no-document-mask", TestFault::kNoDocumentMask}};

std::optional<TestFault> ReadEnvironment() {
  const char* text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0') return std::nullopt;
  for (const auto& [name, fault] : kFaults) {
    if (std::string(text) != name) continue;
    MP_LOG(WARNING) << kVariable << ": this process computes wrong on purpose: " << name;
    return fault;
  }
  MP_LOG(ERROR) << kVariable << "=" << text << " names no fault";
  std::_Exit(2);
}

}  // namespace

bool HasTestFault(TestFault fault) {
  static const std::optional<TestFault> asked = ReadEnvironment();
  return asked == fault;
}

}  // namespace moonpipe
