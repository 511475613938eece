// Models by name: `model.flavor` of a run file instead of a folder. A flavour is the text of a config.json and takes the same parser
// as a file; its weights are drawn afresh.
//
//   kimi-vl-a3b        Kimi-VL-A3B, 16,407,656,048 parameters
//   moonlight-16b-a3b  Moonlight-16B-A3B, 15,960,110,208
//   kimi-k2.5          Kimi K2.5, 1,026,879,376,368; also kimi-k2.6, kimi-k2.7 and kimi-k2.7-code, whose sizes are the same
//   debug-kimi-vl, debug-moonlight, debug-kimi-k2.5   the same parts, small enough for tests; their special tokens are those of the
//                      tokenizer in examples/digits
//
// Names are matched without regard to case and to `-`, `_` and `.`: Kimi_K2.5 is kimi-k2.5.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/spec/model_config.h"

namespace moonpipe {

struct Flavor {
  std::string name;
  std::vector<std::string> aliases;
  std::string config_json;
};

// All flavours, published ones first.
const std::vector<Flavor>& Flavors();

// The flavour of that name or alias. INVALID_ARGUMENT lists the nearest names, or all where none is near.
absl::StatusOr<const Flavor*> FindFlavor(absl::string_view name);

// The configuration that a run trains: config.json of `path`, the file `config`, or the flavour. Errors are those of ReadModelConfig
// and FindFlavor. Exactly one of the three must be set (ValidateSpec).
absl::StatusOr<ModelConfig> ReadModelOf(const cluster::v1::ModelSpec& model);

}  // namespace moonpipe
