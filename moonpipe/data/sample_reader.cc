#include "moonpipe/data/sample_reader.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/skip.h"

namespace moonpipe {
namespace {

constexpr int kAttempts = 3;
constexpr absl::Duration kPause = absl::Milliseconds(20);
constexpr uint64_t kLargestFile = uint64_t{1} << 30;

// Empty for members that belong to no sample (hidden files).
absl::string_view KeyOf(absl::string_view name) {
  const size_t slash = name.rfind('/');
  const size_t base = slash == absl::string_view::npos ? 0 : slash + 1;
  const size_t dot = name.find('.', base);
  if (dot == base) return {};
  return name.substr(0, dot);
}

std::string RecordName(absl::string_view key) { return absl::StrCat(key, ".json"); }

absl::StatusOr<std::string> ReadWhole(const RandomAccessFile& file, uint64_t offset, uint64_t size, const std::string& name) {
  if (size > kLargestFile) return SkipError(kBadRecord, absl::StrCat(name, " has ", size, " bytes; the limit is ", kLargestFile));
  return file.Read(offset, size);
}

absl::StatusOr<std::string> DecodeDataUri(absl::string_view uri) {
  const size_t comma = uri.find(',');
  std::string bytes;
  if (comma == absl::string_view::npos || !absl::EndsWith(uri.substr(0, comma), ";base64") ||
      !absl::Base64Unescape(uri.substr(comma + 1), &bytes)) {
    return SkipError(kBadRecord, "a picture's data URI is not base64");
  }
  return bytes;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SampleReader>> SampleReader::Open(const std::vector<std::string>& shards, SampleReaderOptions options) {
  std::unique_ptr<SampleReader> reader(new SampleReader(std::move(options)));
  for (const std::string& path : shards) MOONPIPE_RETURN_IF_ERROR(Annotate(reader->AddShard(path), path));
  if (reader->samples_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("no sample in ", shards.size(), " file(s), the first of them ",
                                                   shards.empty() ? "" : shards.front(), ": samples are members KEY.json of a tar file"));
  }
  return reader;
}

absl::Status SampleReader::AddShard(const std::string& path) {
  MOONPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<RandomAccessFile> file, options_.open(path));
  MOONPIPE_ASSIGN_OR_RETURN(std::vector<TarMember> members, ReadTarIndex(*file));
  const std::string parent = std::filesystem::path(path).parent_path().string();
  Shard shard{path, parent.empty() ? "." : parent, {}};
  std::vector<Sample> found;
  absl::flat_hash_map<std::string, size_t> by_key;
  for (TarMember& member : members) {
    const absl::string_view key = KeyOf(member.name);
    if (key.empty()) continue;
    const auto [it, is_new] = by_key.try_emplace(std::string(key), found.size());
    if (is_new) found.push_back({std::string(key), shards_.size(), false});
    std::string name = member.name;
    if (!shard.members.try_emplace(std::move(name), std::move(member)).second) found[it->second].twice = true;
  }
  size_t without_record = 0;
  for (Sample& sample : found) {
    if (shard.members.contains(RecordName(sample.key))) {
      samples_.push_back(std::move(sample));
    } else {
      ++without_record;
    }
  }
  if (without_record > 0) MP_LOG(INFO) << path << ": " << without_record << " keys have no .json and are no samples of their own";
  shards_.push_back(std::move(shard));
  return absl::OkStatus();
}

absl::StatusOr<RawSample> SampleReader::Read(uint64_t index) const {
  if (index >= size()) return absl::OutOfRangeError(absl::StrCat("sample ", index, " of a data set of ", size()));
  const Sample& sample = samples_[index];
  absl::Status last;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (attempt > 0) absl::SleepFor(kPause * attempt);
    absl::StatusOr<RawSample> result = ReadOnce(sample);
    if (result.ok() || SkipReason(result.status()).has_value()) return result;
    last = result.status();
  }
  return absl::UnavailableError(absl::StrCat("sample ", index, " (", sample.key, " of ", shards_[sample.shard].path,
                                             ") could not be read, ", kAttempts, " times: ", last.message()));
}

absl::StatusOr<RawSample> SampleReader::ReadOnce(const Sample& sample) const {
  const Shard& shard = shards_[sample.shard];
  if (sample.twice) return SkipError(kBadRecord, "two members of the shard have the same name");
  const auto member = shard.members.find(RecordName(sample.key));
  MOONPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<RandomAccessFile> file, options_.open(shard.path));
  MOONPIPE_ASSIGN_OR_RETURN(const std::string json, ReadWhole(*file, member->second.offset, member->second.size, member->second.name));
  MOONPIPE_ASSIGN_OR_RETURN(Record record, ParseRecord(json));
  RawSample raw{std::move(record), {}};
  for (const std::string& name : raw.record.pictures) {
    MOONPIPE_ASSIGN_OR_RETURN(std::string bytes, ReadPicture(sample, name, *file));
    raw.pictures.push_back(std::move(bytes));
  }
  return raw;
}

absl::StatusOr<std::string> SampleReader::ReadPicture(const Sample& sample, const std::string& name,
                                                      const RandomAccessFile& shard_file) const {
  if (absl::StartsWith(name, "data:")) return DecodeDataUri(name);
  if (absl::StrContains(name, "://")) {
    return SkipError(kBadRecord, absl::StrCat("picture ", name, " is an address; pictures are not fetched from the network"));
  }
  const Shard& shard = shards_[sample.shard];
  const size_t slash = sample.key.rfind('/');
  const std::string beside = slash == std::string::npos ? name : absl::StrCat(sample.key.substr(0, slash + 1), name);
  for (absl::string_view candidate : {absl::StripPrefix(name, "./"), absl::string_view(beside)}) {
    if (const auto member = shard.members.find(candidate); member != shard.members.end()) {
      return ReadWhole(shard_file, member->second.offset, member->second.size, member->second.name);
    }
  }
  return ReadOutsideShard(shard, name);
}

absl::StatusOr<std::string> SampleReader::ReadOutsideShard(const Shard& shard, const std::string& name) const {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::weakly_canonical(shard.folder, error);
  const std::filesystem::path path = std::filesystem::weakly_canonical(folder / name, error);
  if (error) return SkipError(kBadRecord, absl::StrCat("picture name ", absl::CHexEscape(name), ": ", error.message()));
  // Both are free of ".." and of links here, so the file is inside exactly if its path begins with the folder's.
  const std::filesystem::path relative = path.lexically_relative(folder);
  if (!options_.allow_outside_paths && (relative.empty() || *relative.begin() == "..")) {
    return SkipError(kBadRecord, absl::StrCat("picture ", name, " lies outside the data folder ", folder.string(),
                                              "; allow_outside_paths would let it"));
  }
  absl::StatusOr<std::unique_ptr<RandomAccessFile>> file = options_.open(path.string());
  if (absl::IsNotFound(file.status())) {
    return SkipError(kMissingPicture, absl::StrCat("picture ", name, " is neither a member of ", shard.path, " nor a file in ", folder.string()));
  }
  if (absl::IsInvalidArgument(file.status())) return SkipError(kMissingPicture, file.status().message());
  MOONPIPE_RETURN_IF_ERROR(file.status());
  return ReadWhole(**file, 0, (*file)->size(), name);
}

}  // namespace moonpipe
