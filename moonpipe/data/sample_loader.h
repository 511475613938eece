// Samples ready for packing: read, templated, pictures cut to patches. What was made is kept in memory, the least recently used
// dropped first, so that small data sets are prepared once.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "moonpipe/data/chat_template.h"
#include "moonpipe/data/image_processor.h"
#include "moonpipe/data/sample_reader.h"
#include "moonpipe/data/step_source.h"
#include "moonpipe/data/tokenizer.h"

namespace moonpipe {

struct Skip {
  std::string reason;
  std::string detail;
};

struct PreparedSample {
  std::optional<Skip> skip;  // then nothing else is set
  std::vector<int32_t> token_ids;
  std::vector<int32_t> labels;  // the token where it is trained, or ignore_index
  std::vector<PicturePatches> pictures;
  std::string patches_digest;  // SHA-256 of each picture's patches, in hexadecimal, one after another
};

// Labels of a document, not shifted: entry i is token i where it is trained, else `ignore_index`.
std::vector<int32_t> LabelsOf(const TokenSequence& sequence, int64_t ignore_index);

// What the training and the decoding source have in common. Not safe for use from two threads.
class SampleLoader {
 public:
  // Checks the options against tokenizer and files. INVALID_ARGUMENT with both numbers where the tokenizer has ids that the model
  // lacks, or another placeholder than the model.
  static absl::StatusOr<std::unique_ptr<SampleLoader>> Open(const StepSourceOptions& options, uint64_t cache_bytes = kCacheBytes,
                                                            FileOpener open = OpenRandomAccessFile);

  // The training form of a sample. A sample that cannot be used is an answer with `skip` set; an error is the machine's.
  absl::StatusOr<std::shared_ptr<const PreparedSample>> Prepare(uint64_t index);

  // Reads a sample and cuts its pictures; SkipError where the sample is at fault.
  absl::StatusOr<std::pair<Record, std::vector<PicturePatches>>> ReadPictures(uint64_t index) const;
  std::vector<uint32_t> Positions(const std::vector<PicturePatches>& pictures) const;

  const SampleReader& reader() const { return *reader_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const ChatTemplate& chat_template() const { return *template_; }
  const StepSourceOptions& options() const { return options_; }

 private:
  static constexpr uint64_t kCacheBytes = uint64_t{512} << 20;
  struct CacheEntry {
    uint64_t index;
    uint64_t bytes;
    std::shared_ptr<const PreparedSample> sample;
  };

  SampleLoader() = default;
  absl::StatusOr<PreparedSample> Make(uint64_t index) const;
  void Keep(uint64_t index, std::shared_ptr<const PreparedSample> sample);

  StepSourceOptions options_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::optional<ChatTemplate> template_;
  std::unique_ptr<SampleReader> reader_;
  uint64_t cache_limit_ = 0;
  uint64_t cached_bytes_ = 0;
  std::list<CacheEntry> recent_;  // most recently used first
  absl::flat_hash_map<uint64_t, std::list<CacheEntry>::iterator> cached_;
};

}  // namespace moonpipe
