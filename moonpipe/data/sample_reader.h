// Samples out of WebDataset tar shards. The members of a sample share its key: the path up to the first dot of its last part.
// `KEY.json` is its record, and a key without one is no sample. The pictures that the record names are members of the same shard
// (by full name, or relative to the record's own folder in it) or files relative to the folder that the shard lies in.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "moonpipe/data/record.h"
#include "moonpipe/data/tar_index.h"

namespace moonpipe {

struct RawSample {
  Record record;
  std::vector<std::string> pictures;  // file bytes of each of record.pictures
};

struct SampleReaderOptions {
  // Lets records name files outside their shard's folder, also by way of symbolic links.
  bool allow_outside_paths = false;
  FileOpener open = OpenRandomAccessFile;
};

// Samples have global indices: shards in the order given, in a shard by the first member of their key. Safe to use from several threads.
class SampleReader {
 public:
  // Reads the index of every shard. NOT_FOUND, DATA_LOSS or UNAVAILABLE with the shard's path; INVALID_ARGUMENT when the shards
  // hold no sample at all.
  static absl::StatusOr<std::unique_ptr<SampleReader>> Open(const std::vector<std::string>& shards, SampleReaderOptions options = {});

  uint64_t size() const { return samples_.size(); }
  const std::string& Key(uint64_t index) const { return samples_[index].key; }

  // The sample and no other. Fails with a SkipError (bad_json, bad_record, missing_picture) when the sample itself is at fault.
  // A read that the system refuses is tried three times, then UNAVAILABLE: such a sample is not skipped.
  absl::StatusOr<RawSample> Read(uint64_t index) const;

 private:
  struct Shard {
    std::string path;
    std::string folder;
    absl::flat_hash_map<std::string, TarMember> members;
  };
  struct Sample {
    std::string key;
    size_t shard = 0;
    bool twice = false;  // a member's name occurs twice
  };

  explicit SampleReader(SampleReaderOptions options) : options_(std::move(options)) {}
  absl::Status AddShard(const std::string& path);
  absl::StatusOr<RawSample> ReadOnce(const Sample& sample) const;
  absl::StatusOr<std::string> ReadPicture(const Sample& sample, const std::string& name, const RandomAccessFile& shard_file) const;
  absl::StatusOr<std::string> ReadOutsideShard(const Shard& shard, const std::string& name) const;

  SampleReaderOptions options_;
  std::vector<Shard> shards_;
  std::vector<Sample> samples_;
};

}  // namespace moonpipe
