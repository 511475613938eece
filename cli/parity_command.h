// `moonpipe parity`: a recorded reference run through the services that train, and the difference told.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace moonpipe {

struct ParityArguments {
  std::string fixture;              // folder with config.json, model.safetensors, io.safetensors and meta.json
  std::vector<std::string> cases;   // empty: all
  uint32_t stages = 2;
  uint32_t microbatches = 1;        // a case of fewer rows takes one a row; refused where every case has fewer
  std::string schedule = "1f1b";
  bool pin_routing = false;         // the first step follows the recorded choices of the router
  bool json = false;                // one JSON object with every case
  std::vector<std::string> overrides;  // of the run's fields, as of --set
};

// Runs every case on an embedded cluster: one step that is observed, then the recorded optimizer steps. Prints each case's groups with
// their largest differences. An error unless everything that was recorded is within the fixture's tolerances.
absl::Status ParityCommand(const ParityArguments& arguments);

}  // namespace moonpipe
