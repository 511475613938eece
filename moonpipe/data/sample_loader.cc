#include "moonpipe/data/sample_loader.h"

#include "absl/strings/str_cat.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/file_patterns.h"
#include "moonpipe/data/skip.h"

namespace moonpipe {
namespace {

absl::Status CheckOptions(const StepSourceOptions& options) {
  const std::pair<const char*, int64_t> positive[] = {
      {"microbatches", options.microbatches}, {"microbatch_tokens", options.microbatch_tokens},
      {"packing_window", options.packing_window}, {"vocab_size", options.vocab_size}};
  for (const auto& [name, value] : positive) {
    if (value < 1) return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, "; it must be at least 1"));
  }
  return absl::OkStatus();
}

absl::Status CheckAgainstModel(const Tokenizer& tokenizer, const ChatTemplate& chat_template, const StepSourceOptions& options) {
  if (tokenizer.max_id() >= options.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("the tokenizer in ", options.tokenizer_folder, " has ids up to ", tokenizer.max_id(),
                                                   ", but the model's vocab_size is ", options.vocab_size,
                                                   "; use the model's own tokenizer or a vocab_size of at least ", tokenizer.max_id() + 1));
  }
  // A format or a model without pictures never puts the placeholder in.
  if (options.media_placeholder_token_id >= 0 && chat_template.media_pad() >= 0 && chat_template.media_pad() != options.media_placeholder_token_id) {
    return absl::InvalidArgumentError(absl::StrCat("the tokenizer in ", options.tokenizer_folder, " has <|media_pad|> as id ",
                                                   chat_template.media_pad(), ", but the model's media_placeholder_token_id is ",
                                                   options.media_placeholder_token_id));
  }
  return absl::OkStatus();
}

uint64_t BytesOf(const PreparedSample& sample) {
  uint64_t bytes = sizeof(PreparedSample) + 256 + sample.token_ids.size() * 8;
  for (const PicturePatches& picture : sample.pictures) bytes += picture.patches.size() + sizeof(PicturePatches);
  return bytes;
}

}  // namespace

std::vector<int32_t> LabelsOf(const TokenSequence& sequence, int64_t ignore_index) {
  std::vector<int32_t> labels(sequence.ids.size(), static_cast<int32_t>(ignore_index));
  for (size_t i = 0; i < labels.size(); ++i) {
    if (sequence.trained[i]) labels[i] = sequence.ids[i];
  }
  return labels;
}

absl::StatusOr<std::unique_ptr<SampleLoader>> SampleLoader::Open(const StepSourceOptions& options, uint64_t cache_bytes, FileOpener open) {
  MOONPIPE_RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<SampleLoader> loader(new SampleLoader());
  loader->options_ = options;
  loader->cache_limit_ = cache_bytes;
  MOONPIPE_ASSIGN_OR_RETURN(loader->tokenizer_, Tokenizer::Load(options.tokenizer_folder));
  MOONPIPE_ASSIGN_OR_RETURN(loader->template_, ChatTemplate::Make(options.chat_template, loader->tokenizer_.get()));
  MOONPIPE_RETURN_IF_ERROR(CheckAgainstModel(*loader->tokenizer_, *loader->template_, options));
  MOONPIPE_ASSIGN_OR_RETURN(const std::vector<std::string> files, ExpandFilePatterns(options.files));
  MOONPIPE_ASSIGN_OR_RETURN(loader->reader_, SampleReader::Open(files, {options.allow_outside_paths, std::move(open)}));
  return loader;
}

absl::StatusOr<std::pair<Record, std::vector<PicturePatches>>> SampleLoader::ReadPictures(uint64_t index) const {
  MOONPIPE_ASSIGN_OR_RETURN(RawSample raw, reader_->Read(index));
  // Not skipped: a run that trains on half of what it was given would not be noticed.
  if (options_.media_placeholder_token_id < 0 && !raw.pictures.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("sample ", index, " (", reader_->Key(index), ") has ", raw.pictures.size(),
                                                   " pictures, but the model is text-only: its config.json has no vision_config; train on "
                                                   "samples without pictures or on a model with a tower"));
  }
  std::vector<PicturePatches> pictures;
  for (size_t i = 0; i < raw.pictures.size(); ++i) {
    absl::StatusOr<PicturePatches> picture = ProcessPicture(raw.pictures[i], options_.pictures);
    // A data URI would flood the message.
    if (!picture.ok()) return Annotate(picture.status(), raw.record.pictures[i].substr(0, 80));
    pictures.push_back(*std::move(picture));
  }
  return std::pair(std::move(raw.record), std::move(pictures));
}

std::vector<uint32_t> SampleLoader::Positions(const std::vector<PicturePatches>& pictures) const {
  std::vector<uint32_t> positions;
  for (const PicturePatches& picture : pictures) positions.push_back(MediaPositions(picture.rows, picture.columns, options_.pictures.merge));
  return positions;
}

absl::StatusOr<PreparedSample> SampleLoader::Make(uint64_t index) const {
  MOONPIPE_ASSIGN_OR_RETURN(auto read, ReadPictures(index));
  MOONPIPE_ASSIGN_OR_RETURN(TokenSequence sequence, template_->Render(read.first, Positions(read.second)));
  if (sequence.ids.size() > static_cast<size_t>(options_.microbatch_tokens)) {
    return SkipError(kTooLong, absl::StrCat(sequence.ids.size(), " tokens; a microbatch holds ", options_.microbatch_tokens));
  }
  PreparedSample sample;
  sample.labels = LabelsOf(sequence, options_.ignore_index);
  sample.token_ids = std::move(sequence.ids);
  sample.pictures = std::move(read.second);
  std::string digests;
  for (const PicturePatches& picture : sample.pictures) {
    digests += Sha256Hex(absl::string_view(reinterpret_cast<const char*>(picture.patches.data()), picture.patches.size()));
  }
  sample.patches_digest = std::move(digests);
  return sample;
}

absl::StatusOr<std::shared_ptr<const PreparedSample>> SampleLoader::Prepare(uint64_t index) {
  if (const auto hit = cached_.find(index); hit != cached_.end()) {
    recent_.splice(recent_.begin(), recent_, hit->second);
    return hit->second->sample;
  }
  absl::StatusOr<PreparedSample> made = Make(index);
  if (!made.ok()) {
    const std::optional<std::string> reason = SkipReason(made.status());
    if (!reason.has_value()) return made.status();
    MP_LOG(WARNING) << "sample " << index << " (" << reader_->Key(index) << ") is skipped: " << *reason << ": " << made.status().message();
    PreparedSample skipped;
    skipped.skip = Skip{*reason, std::string(made.status().message())};
    made = std::move(skipped);
  }
  auto sample = std::make_shared<const PreparedSample>(*std::move(made));
  Keep(index, sample);
  return sample;
}

void SampleLoader::Keep(uint64_t index, std::shared_ptr<const PreparedSample> sample) {
  const uint64_t bytes = BytesOf(*sample);
  recent_.push_front({index, bytes, std::move(sample)});
  cached_[index] = recent_.begin();
  cached_bytes_ += bytes;
  while (cached_bytes_ > cache_limit_) {
    cached_bytes_ -= recent_.back().bytes;
    cached_.erase(recent_.back().index);
    recent_.pop_back();
  }
}

}  // namespace moonpipe
