// What was decided, step by step, on disk before anybody acts on it: after a crash the coordinator knows which decision
// it may have sent. An append-only file of JSON lines,
//
//   {"crc":"8f3a90c1","entry":{"step":12,"generation":3,...}}
//
// each with the CRC-32 of its entry's bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "moonpipe/data/v1/manifest.pb.h"

namespace moonpipe {

struct JournalEntry {
  uint64_t step = 0;
  uint64_t generation = 0;
  std::string manifest_digest;  // raw bytes, as in StepManifest
  double loss = 0;
  double grad_norm = 0;
  double clip_factor = 1;
  std::string skip_reason;  // nothing for a committed step
  data::v1::DataCursor next_cursor;
};

// Not safe for use from two threads. Holds an exclusive lock on the file: a second coordinator of the same run is
// refused.
class Journal {
 public:
  // Opens or creates the file, reads it, and cuts off a last line that was being written when the process died
  // (torn_bytes() tells). FAILED_PRECONDITION when another process has it open; DATA_LOSS, with the line, for damage
  // anywhere else, which a crash cannot cause.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(const std::string& path);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // Returns when the entry is on the disk. After an error the file is as before, or the journal refuses everything from
  // then on.
  absl::Status Append(const JournalEntry& entry);

  // Everything in the file, oldest first. A step stands twice if it was taken again after a resume from an earlier
  // checkpoint.
  const std::vector<JournalEntry>& entries() const { return entries_; }
  // The newest entry of a step; null if there is none.
  const JournalEntry* Find(uint64_t step) const;
  // A step that is taken again must be made of the same samples. FAILED_PRECONDITION with both digests if the journal
  // knows another one.
  absl::Status CheckReplay(uint64_t step, const std::string& manifest_digest) const;
  // Bytes that Open cut off.
  uint64_t torn_bytes() const { return torn_bytes_; }

 private:
  Journal(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  absl::Status Recover();

  const std::string path_;
  const int fd_;
  uint64_t size_ = 0;
  uint64_t torn_bytes_ = 0;
  absl::Status broken_;
  std::vector<JournalEntry> entries_;
};

}  // namespace moonpipe
