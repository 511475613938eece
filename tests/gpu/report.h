// What a check of the GPU found, one line a finding, and whether anything failed.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace moonpipe::testing {

class GpuReport {
 public:
  // Prints `finding` under "ok" or "FAIL".
  void Add(bool good, absl::string_view finding);
  // Prints a measurement that nothing is demanded of.
  void Note(absl::string_view finding);
  bool failed() const { return failed_; }

 private:
  bool failed_ = false;
};

// One step of the recorded Kimi-VL in `fixture_folder`, on `device` against the CPU: forward, gradients and AdamW in fp32; forward and
// gradients in bf16; two runs that must be equal in every bit; times.
void CheckModel(const std::string& fixture_folder, const std::string& device, GpuReport& report);

// NCCL on device 0: a group of one rank that sums and is aborted, and an edge that refuses what it must and ends by Abort.
void CheckNccl(GpuReport& report);

}  // namespace moonpipe::testing
