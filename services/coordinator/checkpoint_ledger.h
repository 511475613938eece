// The checkpoints of a run, as folders. A checkpoint is a Hugging Face model folder with optimizer state beside the
// weights:
//
//   RUN/checkpoints/step-00000012/           exists only whole: it is renamed into place when all of it is on the disk
//     model-00001-of-00003.safetensors ...     weights, and the workers' other shards, named by the plan
//     model.safetensors.index.json             merged from the shards' lists
//     config.json, tokenizer files             untouched
//     moonpipe.manifest.json                   every other file with size and SHA-256; without it, no checkpoint
//   RUN/checkpoints/step-00000016.writing/   being written; whatever is left of one at the start is removed
//
// No thread and no clock; not safe for use from two threads. Blocks on the disk.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "moonpipe/worker/v1/worker_service.pb.h"
#include "services/coordinator/checkpoint_manifest.h"

namespace moonpipe {

struct CheckpointInfo {
  uint64_t step = 0;
  std::string path;
  uint64_t size_bytes = 0;      // of all its files, the manifest included
  std::string manifest_sha256;  // of the manifest's bytes
  CheckpointManifest manifest;
};

// A folder that looks like a checkpoint and is none, and why.
struct IncompleteCheckpoint {
  std::string path;
  std::string reason;
};

struct CheckpointList {
  std::vector<CheckpointInfo> complete;  // newest first
  std::vector<IncompleteCheckpoint> incomplete;
};

// What a checkpoint is made of, besides the shards' bytes that the workers have written.
struct CheckpointContent {
  std::vector<worker::v1::ShardFile> shards;  // of all workers
  std::string config_json;                    // as it was read
  std::vector<std::string> data_files;  // paths of what prepares data, pictures included; copied under their own names
  // step and files are filled in by the ledger.
  CheckpointManifest manifest;
};

struct ResumeChoice {
  std::optional<CheckpointInfo> checkpoint;  // absent: begin afresh
  std::string reason;                        // one sentence for the log
};

enum class Verify { kSizes, kChecksums };

// Reads one folder as a checkpoint. FAILED_PRECONDITION says why it is none: no manifest, a file missing or of another
// size (both numbers), with kChecksums also another SHA-256. NOT_FOUND if there is no such folder.
absl::StatusOr<CheckpointInfo> ReadCheckpoint(const std::string& path, Verify verify);

class CheckpointLedger {
 public:
  // Makes RUN/checkpoints and removes what an interrupted save or removal left there.
  static absl::StatusOr<CheckpointLedger> Open(const std::string& run_folder);

  // A fresh, empty folder for the shards of `step`; an earlier try at the same step is removed. Returns its path.
  absl::StatusOr<std::string> Begin(uint64_t step);
  // Checks that every shard is there with its size and that no tensor lies in two, writes everything else, syncs, and
  // renames the folder into place; a folder of the same step that was there before is removed only after that. On an
  // error the checkpoint does not exist. INVALID_ARGUMENT or FAILED_PRECONDITION names the file and both numbers.
  absl::StatusOr<CheckpointInfo> Finish(uint64_t step, const CheckpointContent& content);
  // Gives up a save that was begun.
  absl::Status Abandon(uint64_t step);

  // Newest first; an incomplete folder is listed apart and never chosen.
  absl::StatusOr<CheckpointList> List(Verify verify = Verify::kSizes) const;
  // After the save of step `newest`: removes complete checkpoints but it and the `keep_last` - 1 before it. Those of later steps go
  // too: they are of a run that was given up when this one began at an earlier step, and `auto` must not take them up. Returns the
  // paths that are gone.
  absl::StatusOr<std::vector<std::string>> Retain(uint32_t keep_last, uint64_t newest);

  // What to begin from: `auto` the newest checkpoint whose checksums hold, or nothing; `never` nothing; a number that
  // step of this run; anything else the path of a checkpoint. NOT_FOUND or FAILED_PRECONDITION when a named one is not
  // there or not whole.
  absl::StatusOr<ResumeChoice> ChooseResume(const std::string& resume) const;

  const std::string& folder() const { return folder_; }
  // "step-00000012"
  static std::string NameOf(uint64_t step);

 private:
  explicit CheckpointLedger(std::string folder) : folder_(std::move(folder)) {}
  std::string PathOf(uint64_t step) const;
  std::string WritingPathOf(uint64_t step) const;

  std::string folder_;
};

}  // namespace moonpipe
