// How fast a device can be at most, by its name. The table is data: device_peaks.json beside this file, compiled in.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moonpipe {

struct DevicePeak {
  std::string match;          // occurs in the device's name, whatever the case
  double flops_per_second = 0;  // dense bf16
  std::string source;
};

// The table in the form of the file, every entry checked: INVALID_ARGUMENT names the entry.
absl::StatusOr<std::vector<DevicePeak>> ParseDevicePeaks(absl::string_view json);

// The table that is compiled in.
const std::vector<DevicePeak>& DevicePeaks();

// The first entry that occurs in `device_name`; none for a device that the table does not know: its peak is unknown and never a
// guess.
std::optional<DevicePeak> FindDevicePeak(absl::string_view device_name);

}  // namespace moonpipe
