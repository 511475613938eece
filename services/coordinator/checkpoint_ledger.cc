#include "services/coordinator/checkpoint_ledger.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "moonpipe/base/fault_point.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kPrefix = "step-";
constexpr absl::string_view kWriting = ".writing";
constexpr absl::string_view kRemoving = ".removing";
constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kConfigName[] = "config.json";

absl::Status FileError(absl::string_view action, const std::string& path, const std::error_code& error) {
  return absl::InternalError(absl::StrCat("cannot ", action, " ", path, ": ", error.message()));
}

bool AllDigits(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](char c) { return absl::ascii_isdigit(static_cast<unsigned char>(c)); });
}

// The step that a folder's name tells; nothing if it is not the name of a checkpoint.
std::optional<uint64_t> StepOf(absl::string_view name) {
  uint64_t step = 0;
  if (!absl::ConsumePrefix(&name, kPrefix) || !AllDigits(name) || !absl::SimpleAtoi(name, &step)) return std::nullopt;
  if (absl::StrCat(kPrefix, name) != CheckpointLedger::NameOf(step)) return std::nullopt;
  return step;
}

bool IsPlainName(absl::string_view name) {
  return !name.empty() && name != "." && name != ".." && !absl::StrContains(name, '/') &&
         !absl::StrContains(name, '\0');
}

absl::StatusOr<uint64_t> SizeOf(const std::string& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return absl::NotFoundError(absl::StrCat(path, " is not there"));
  const uintmax_t size = fs::file_size(path, error);
  if (error) return FileError("look at", path, error);
  return static_cast<uint64_t>(size);
}

// Removes a folder so that a crash in between leaves no folder under a checkpoint's name.
absl::Status RemoveFolder(const std::string& path) {
  std::error_code error;
  std::string doomed = path;
  if (!absl::EndsWith(path, kWriting) && !absl::EndsWith(path, kRemoving)) {
    doomed = absl::StrCat(path, kRemoving);
    fs::remove_all(doomed, error);
    fs::rename(path, doomed, error);
    if (error) return FileError("rename", path, error);
    MOONPIPE_RETURN_IF_ERROR(SyncFolder(fs::path(path).parent_path().string()));
  }
  fs::remove_all(doomed, error);
  if (error) return FileError("remove", doomed, error);
  return absl::OkStatus();
}

// The index of the weights, merged from what each worker wrote.
absl::StatusOr<std::string> MergeIndex(const std::vector<worker::v1::ShardFile>& shards) {
  std::map<std::string, std::string> weight_map;
  uint64_t total = 0;
  for (const worker::v1::ShardFile& shard : shards) {
    for (const std::string& tensor : shard.tensors()) {
      const auto [entry, is_new] = weight_map.emplace(tensor, shard.name());
      if (!is_new) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor ", tensor, " lies in ", entry->second, " and in ", shard.name()));
      }
    }
    if (!shard.tensors().empty()) total += shard.tensor_bytes();
  }
  if (weight_map.empty()) return absl::InvalidArgumentError("no shard holds a weight");
  nlohmann::ordered_json index;
  index["metadata"] = {{"total_size", total}};
  index["weight_map"] = weight_map;
  return index.dump(2) + "\n";
}

// Collects the files of a folder that is being written, and the names that are taken.
class FolderContents {
 public:
  explicit FolderContents(std::string folder) : folder_(std::move(folder)) {}

  // A file that a worker has written.
  absl::Status AddShard(const worker::v1::ShardFile& shard) {
    MOONPIPE_RETURN_IF_ERROR(Claim(shard.name()));
    const auto size = SizeOf(absl::StrCat(folder_, "/", shard.name()));
    if (!size.ok()) return absl::FailedPreconditionError(absl::StrCat("shard ", size.status().message()));
    if (*size != shard.size_bytes()) {
      return absl::FailedPreconditionError(absl::StrCat("shard ", folder_, "/", shard.name(), " has ", *size,
                                                        " bytes, its worker wrote ", shard.size_bytes()));
    }
    if (shard.sha256().size() != 64) {
      return absl::InvalidArgumentError(
          absl::StrCat("shard ", shard.name(), " has the SHA-256 \"", shard.sha256(), "\""));
    }
    files_.push_back({shard.name(), shard.size_bytes(), shard.sha256()});
    return absl::OkStatus();
  }

  absl::Status Write(const std::string& name, const std::string& bytes) {
    MOONPIPE_RETURN_IF_ERROR(Claim(name));
    MOONPIPE_RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(folder_, "/", name), bytes));
    files_.push_back({name, bytes.size(), Sha256Hex(bytes)});
    return absl::OkStatus();
  }

  // Refuses a file that nobody answers for: the manifest would not cover it.
  absl::Status CheckNothingElse() const {
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_, error)) {
      if (names_.count(entry.path().filename().string()) == 0) {
        return absl::FailedPreconditionError(
            absl::StrCat(entry.path().string(), " belongs to no shard of the checkpoint"));
      }
    }
    if (error) return FileError("list", folder_, error);
    return absl::OkStatus();
  }

  std::vector<CheckpointFile> Sorted() const {
    std::vector<CheckpointFile> files = files_;
    std::sort(files.begin(), files.end(),
              [](const CheckpointFile& a, const CheckpointFile& b) { return a.name < b.name; });
    return files;
  }

 private:
  absl::Status Claim(const std::string& name) {
    if (!IsPlainName(name) || name == kCheckpointManifestName) {
      return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" cannot be the name of a file of a checkpoint"));
    }
    if (!names_.insert(name).second)
      return absl::InvalidArgumentError(absl::StrCat("two files of the checkpoint are named ", name));
    return absl::OkStatus();
  }

  const std::string folder_;
  std::set<std::string> names_;
  std::vector<CheckpointFile> files_;
};

// Puts `from` where `to` is. If something is there, both change places at once, so that at every moment a whole folder
// bears the name.
absl::Status MoveIntoPlace(const std::string& from, const std::string& to) {
  std::error_code ignored;
  const bool occupied = fs::exists(to, ignored);
  const unsigned int flags = occupied ? RENAME_EXCHANGE : RENAME_NOREPLACE;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) != 0) {
    // Some file systems know no flags; without a folder in the way a plain rename does the same.
    if (occupied || errno != EINVAL || ::rename(from.c_str(), to.c_str()) != 0) {
      return absl::InternalError(absl::StrCat("cannot rename ", from, " to ", to, ": ", std::strerror(errno)));
    }
  }
  return SyncFolder(fs::path(to).parent_path().string());
}

}  // namespace

absl::StatusOr<CheckpointInfo> ReadCheckpoint(const std::string& path, Verify verify) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return absl::NotFoundError(absl::StrCat("there is no folder ", path));
  const std::string manifest_path = absl::StrCat(path, "/", kCheckpointManifestName);
  const auto bytes = ReadFile(manifest_path);
  if (!bytes.ok())
    return absl::FailedPreconditionError(absl::StrCat(path, " has no readable ", kCheckpointManifestName));
  auto manifest = ParseCheckpointManifest(*bytes);
  if (!manifest.ok())
    return absl::FailedPreconditionError(absl::StrCat(manifest_path, ": ", manifest.status().message()));
  for (const CheckpointFile& file : manifest->files) {
    if (!IsPlainName(file.name)) {
      return absl::FailedPreconditionError(
          absl::StrCat(manifest_path, ": \"", file.name, "\" is no name of a file in the folder"));
    }
    const std::string file_path = absl::StrCat(path, "/", file.name);
    const auto size = SizeOf(file_path);
    if (!size.ok()) return absl::FailedPreconditionError(size.status().message());
    if (*size != file.size_bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat(file_path, " has ", *size, " bytes, the manifest says ", file.size_bytes));
    }
    if (verify != Verify::kChecksums) continue;
    MOONPIPE_ASSIGN_OR_RETURN(const std::string sha256, Sha256HexOfFile(file_path));
    if (sha256 != file.sha256) {
      return absl::FailedPreconditionError(
          absl::StrCat(file_path, " has the SHA-256 ", sha256, ", the manifest says ", file.sha256));
    }
  }
  CheckpointInfo info;
  info.step = manifest->step;
  info.path = path;
  info.size_bytes = manifest->total_bytes() + bytes->size();
  info.manifest_sha256 = Sha256Hex(*bytes);
  info.manifest = *std::move(manifest);
  return info;
}

std::string CheckpointLedger::NameOf(uint64_t step) { return absl::StrFormat("step-%08d", step); }
std::string CheckpointLedger::PathOf(uint64_t step) const { return absl::StrCat(folder_, "/", NameOf(step)); }
std::string CheckpointLedger::WritingPathOf(uint64_t step) const { return absl::StrCat(PathOf(step), kWriting); }

absl::StatusOr<CheckpointLedger> CheckpointLedger::Open(const std::string& run_folder) {
  CheckpointLedger ledger(absl::StrCat(run_folder, "/checkpoints"));
  std::error_code error;
  fs::create_directories(ledger.folder_, error);
  if (error) return FileError("make", ledger.folder_, error);
  std::vector<std::string> leftovers;
  for (const fs::directory_entry& entry : fs::directory_iterator(ledger.folder_, error)) {
    const std::string name = entry.path().filename().string();
    for (absl::string_view ending : {kWriting, kRemoving}) {
      absl::string_view stem = name;
      if (absl::ConsumeSuffix(&stem, ending) && StepOf(stem).has_value()) leftovers.push_back(entry.path().string());
    }
  }
  if (error) return FileError("list", ledger.folder_, error);
  for (const std::string& leftover : leftovers) MOONPIPE_RETURN_IF_ERROR(RemoveFolder(leftover));
  MOONPIPE_RETURN_IF_ERROR(SyncFolder(run_folder));
  return ledger;
}

absl::StatusOr<std::string> CheckpointLedger::Begin(uint64_t step) {
  const std::string path = WritingPathOf(step);
  MOONPIPE_RETURN_IF_ERROR(RemoveFolder(path));
  std::error_code error;
  if (!fs::create_directory(path, error)) return FileError("make", path, error);
  MOONPIPE_RETURN_IF_ERROR(SyncFolder(folder_));
  return path;
}

absl::Status CheckpointLedger::Abandon(uint64_t step) { return RemoveFolder(WritingPathOf(step)); }

absl::StatusOr<CheckpointInfo> CheckpointLedger::Finish(uint64_t step, const CheckpointContent& content) {
  const std::string writing = WritingPathOf(step);
  std::error_code ignored;
  if (!fs::is_directory(writing, ignored)) {
    return absl::FailedPreconditionError(
        absl::StrCat("no checkpoint of step ", step, " was begun: there is no folder ", writing));
  }
  FolderContents contents(writing);
  for (const worker::v1::ShardFile& shard : content.shards) MOONPIPE_RETURN_IF_ERROR(contents.AddShard(shard));
  MOONPIPE_ASSIGN_OR_RETURN(const std::string index, MergeIndex(content.shards));
  MOONPIPE_RETURN_IF_ERROR(contents.CheckNothingElse());
  MOONPIPE_RETURN_IF_ERROR(contents.Write(kIndexName, index));
  MOONPIPE_RETURN_IF_ERROR(contents.Write(kConfigName, content.config_json));
  for (const std::string& path : content.data_files) {
    MOONPIPE_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
    MOONPIPE_RETURN_IF_ERROR(contents.Write(fs::path(path).filename().string(), bytes));
  }
  // The workers have synced the bytes of their shards; this makes their names durable before the manifest vouches for
  // them.
  MOONPIPE_RETURN_IF_ERROR(SyncFolder(writing));

  CheckpointManifest manifest = content.manifest;
  manifest.step = step;
  manifest.files = contents.Sorted();
  MOONPIPE_RETURN_IF_ERROR(FaultPoint("before_manifest", step));
  MOONPIPE_RETURN_IF_ERROR(
      WriteFileAtomically(absl::StrCat(writing, "/", kCheckpointManifestName), CheckpointManifestToJson(manifest)));
  MOONPIPE_RETURN_IF_ERROR(FaultPoint("before_rename", step));
  MOONPIPE_RETURN_IF_ERROR(MoveIntoPlace(writing, PathOf(step)));
  MOONPIPE_RETURN_IF_ERROR(FaultPoint("after_rename", step));
  // After an exchange the older folder of this step lies here.
  MOONPIPE_RETURN_IF_ERROR(RemoveFolder(writing));
  return ReadCheckpoint(PathOf(step), Verify::kSizes);
}

absl::StatusOr<CheckpointList> CheckpointLedger::List(Verify verify) const {
  CheckpointList list;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_, error)) {
    const std::optional<uint64_t> step = StepOf(entry.path().filename().string());
    if (!step.has_value()) continue;
    auto info = ReadCheckpoint(entry.path().string(), verify);
    if (info.ok() && info->step != *step) {
      info = absl::FailedPreconditionError(
          absl::StrCat(entry.path().string(), " holds the manifest of step ", info->step));
    }
    if (info.ok()) {
      list.complete.push_back(*std::move(info));
    } else {
      list.incomplete.push_back({entry.path().string(), std::string(info.status().message())});
    }
  }
  if (error) return FileError("list", folder_, error);
  std::sort(list.complete.begin(), list.complete.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step > b.step; });
  std::sort(list.incomplete.begin(), list.incomplete.end(),
            [](const IncompleteCheckpoint& a, const IncompleteCheckpoint& b) { return a.path < b.path; });
  return list;
}

absl::StatusOr<std::vector<std::string>> CheckpointLedger::Retain(uint32_t keep_last, uint64_t newest) {
  MOONPIPE_ASSIGN_OR_RETURN(const CheckpointList list, List());
  std::vector<std::string> removed;
  uint32_t kept = 0;
  for (const CheckpointInfo& checkpoint : list.complete) {
    if (checkpoint.step <= newest && kept < std::max<uint32_t>(keep_last, 1)) {
      ++kept;
      continue;
    }
    MOONPIPE_RETURN_IF_ERROR(RemoveFolder(checkpoint.path));
    removed.push_back(checkpoint.path);
  }
  return removed;
}

absl::StatusOr<ResumeChoice> CheckpointLedger::ChooseResume(const std::string& resume) const {
  if (resume == "never") return ResumeChoice{std::nullopt, "checkpoint.resume is never"};
  if (resume.empty() || resume == "auto") {
    MOONPIPE_ASSIGN_OR_RETURN(const CheckpointList list, List());
    std::vector<std::string> passed_over;
    for (const IncompleteCheckpoint& incomplete : list.incomplete) passed_over.push_back(incomplete.reason);
    for (const CheckpointInfo& candidate : list.complete) {
      auto info = ReadCheckpoint(candidate.path, Verify::kChecksums);
      if (!info.ok()) {
        passed_over.push_back(std::string(info.status().message()));
        continue;
      }
      ResumeChoice choice{*std::move(info),
                          absl::StrCat("step ", candidate.step, " is the newest complete checkpoint")};
      if (!passed_over.empty()) absl::StrAppend(&choice.reason, "; passed over: ", absl::StrJoin(passed_over, "; "));
      return choice;
    }
    std::string reason = absl::StrCat("there is no complete checkpoint in ", folder_);
    if (!passed_over.empty()) absl::StrAppend(&reason, "; passed over: ", absl::StrJoin(passed_over, "; "));
    return ResumeChoice{std::nullopt, reason};
  }
  uint64_t step = 0;
  const bool is_step = AllDigits(resume) && absl::SimpleAtoi(resume, &step);
  auto info = ReadCheckpoint(is_step ? PathOf(step) : resume, Verify::kChecksums);
  if (!info.ok()) return Annotate(info.status(), absl::StrCat("checkpoint.resume is ", resume));
  return ResumeChoice{*std::move(info), absl::StrCat("checkpoint.resume is ", resume)};
}

}  // namespace moonpipe
