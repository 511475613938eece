// moonpipe.manifest.json: the file that makes a folder a checkpoint. It is written last and names every other file with
// its size and checksum, and everything that a resume needs besides the weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/data/v1/manifest.pb.h"

namespace moonpipe {

inline constexpr char kCheckpointManifestName[] = "moonpipe.manifest.json";

struct CheckpointFile {
  std::string name;  // within the folder
  uint64_t size_bytes = 0;
  std::string sha256;  // hexadecimal
  bool operator==(const CheckpointFile&) const = default;
};

struct CheckpointManifest {
  uint64_t step = 0;            // after which it was taken
  data::v1::DataCursor cursor;  // where the data goes on
  uint64_t seed = 0;            // of fresh weights, the order of samples and every counter-based draw
  cluster::v1::TrainingRunSpec spec;
  // What the bits of a run depend on besides its inputs; a resume says when they differ.
  uint32_t compute_threads = 1;
  std::string cpu_model;
  std::string torch_version;
  absl::Time ready_time;
  std::vector<CheckpointFile> files;  // sorted by name; all but the manifest itself

  uint64_t total_bytes() const;
};

std::string CheckpointManifestToJson(const CheckpointManifest& manifest);
// INVALID_ARGUMENT names the field.
absl::StatusOr<CheckpointManifest> ParseCheckpointManifest(absl::string_view json);

// What of `before` differs in a process that resumes from it, in sentences; empty if the bits can be equal.
std::vector<std::string> DifferencesThatChangeBits(const CheckpointManifest& before, uint32_t compute_threads,
                                                   const std::string& cpu_model, const std::string& torch_version);

}  // namespace moonpipe
