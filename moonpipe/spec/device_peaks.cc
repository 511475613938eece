#include "moonpipe/spec/device_peaks.h"

#include <cmath>
#include <cstdlib>
#include <iostream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "moonpipe/spec/device_peaks_data.h"
#include "nlohmann/json.hpp"

namespace moonpipe {

absl::StatusOr<std::vector<DevicePeak>> ParseDevicePeaks(absl::string_view json) {
  const nlohmann::json root = nlohmann::json::parse(json.begin(), json.end(), nullptr, /*allow_exceptions=*/false);
  if (!root.is_object() || !root.contains("devices") || !root["devices"].is_array()) {
    return absl::InvalidArgumentError("device peaks: expected an object with the list `devices`");
  }
  std::vector<DevicePeak> peaks;
  for (const nlohmann::json& entry : root["devices"]) {
    const bool good = entry.is_object() && entry.contains("match") && entry["match"].is_string() && entry.contains("bf16") &&
                      entry["bf16"].is_number() && entry.contains("source") && entry["source"].is_string();
    if (!good) return absl::InvalidArgumentError(absl::StrCat("device peaks: ", entry.dump(), " needs match, bf16 and source"));
    DevicePeak peak{entry["match"], entry["bf16"], entry["source"]};
    if (!(std::isfinite(peak.flops_per_second) && peak.flops_per_second > 0) || peak.match.empty() || peak.source.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("device peaks: ", entry.dump(), " needs a rate above 0, a name and a source"));
    }
    for (const DevicePeak& before : peaks) {
      if (absl::StrContains(absl::AsciiStrToLower(peak.match), absl::AsciiStrToLower(before.match))) {
        return absl::InvalidArgumentError(absl::StrCat("device peaks: ", peak.match, " is never reached: ", before.match, " stands before it"));
      }
    }
    peaks.push_back(std::move(peak));
  }
  return peaks;
}

const std::vector<DevicePeak>& DevicePeaks() {
  static const auto* peaks = [] {
    auto parsed = ParseDevicePeaks(kDevicePeaksJson);
    if (!parsed.ok()) {
      std::cerr << parsed.status() << "\n";
      std::abort();
    }
    return new std::vector<DevicePeak>(*std::move(parsed));
  }();
  return *peaks;
}

std::optional<DevicePeak> FindDevicePeak(absl::string_view device_name) {
  const std::string name = absl::AsciiStrToLower(device_name);
  for (const DevicePeak& peak : DevicePeaks()) {
    if (absl::StrContains(name, absl::AsciiStrToLower(peak.match))) return peak;
  }
  return std::nullopt;
}

}  // namespace moonpipe
