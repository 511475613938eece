#include "services/coordinator/journal.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using nlohmann::json;

constexpr absl::string_view kBeforeCrc = R"({"crc":")";
constexpr absl::string_view kBeforeEntry = R"(","entry":)";
constexpr size_t kCrcDigits = 8;

absl::Status SystemError(absl::string_view action, const std::string& path) {
  return absl::InternalError(absl::StrCat(action, " ", path, ": ", std::strerror(errno)));
}

std::string CrcOf(absl::string_view bytes) {
  const uLong crc = crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), static_cast<uInt>(bytes.size()));
  return absl::StrFormat("%08x", crc);
}

// JSON has no infinity and no NaN; a skipped step may well have them.
json NumberOrWord(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}
double FromNumberOrWord(const json& value) {
  if (value.is_number()) return value.get<double>();
  const std::string word = value.get<std::string>();
  if (word == "nan") return std::numeric_limits<double>::quiet_NaN();
  return word == "inf" ? std::numeric_limits<double>::infinity() : -std::numeric_limits<double>::infinity();
}

std::string LineOf(const JournalEntry& entry) {
  nlohmann::ordered_json text;
  text["step"] = entry.step;
  text["generation"] = entry.generation;
  text["manifest"] = absl::BytesToHexString(entry.manifest_digest);
  text["loss"] = NumberOrWord(entry.loss);
  text["grad_norm"] = NumberOrWord(entry.grad_norm);
  text["clip_factor"] = NumberOrWord(entry.clip_factor);
  text["skip_reason"] = entry.skip_reason;
  text["next_cursor"] = {
      {"epoch", entry.next_cursor.epoch()}, {"window", entry.next_cursor.window()}, {"pack", entry.next_cursor.pack()}};
  const std::string body = text.dump();
  return absl::StrCat(kBeforeCrc, CrcOf(body), kBeforeEntry, body, "}\n");
}

// Nothing for a line (without its newline) that is damaged in any way.
std::optional<JournalEntry> ParseLine(absl::string_view line) {
  const size_t body_begin = kBeforeCrc.size() + kCrcDigits + kBeforeEntry.size();
  if (line.size() < body_begin + 1 || !absl::StartsWith(line, kBeforeCrc) || !absl::EndsWith(line, "}"))
    return std::nullopt;
  if (line.substr(kBeforeCrc.size() + kCrcDigits, kBeforeEntry.size()) != kBeforeEntry) return std::nullopt;
  const absl::string_view body = line.substr(body_begin, line.size() - body_begin - 1);
  if (line.substr(kBeforeCrc.size(), kCrcDigits) != CrcOf(body)) return std::nullopt;
  try {
    const json text = json::parse(body.begin(), body.end());
    JournalEntry entry;
    entry.step = text.at("step").get<uint64_t>();
    entry.generation = text.at("generation").get<uint64_t>();
    entry.manifest_digest = absl::HexStringToBytes(text.at("manifest").get<std::string>());
    entry.loss = FromNumberOrWord(text.at("loss"));
    entry.grad_norm = FromNumberOrWord(text.at("grad_norm"));
    entry.clip_factor = FromNumberOrWord(text.at("clip_factor"));
    entry.skip_reason = text.at("skip_reason").get<std::string>();
    entry.next_cursor.set_epoch(text.at("next_cursor").at("epoch").get<uint64_t>());
    entry.next_cursor.set_window(text.at("next_cursor").at("window").get<uint64_t>());
    entry.next_cursor.set_pack(text.at("next_cursor").at("pack").get<uint64_t>());
    return entry;
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) return SystemError("cannot open journal", path);
  std::unique_ptr<Journal> journal(new Journal(path, fd));
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("journal ", path, " is in use by another coordinator; stop it, or give this run another folder"));
  }
  MOONPIPE_RETURN_IF_ERROR(journal->Recover());
  if (journal->size_ == 0) {
    // A new file: its name must outlive a crash too.
    const std::string parent = std::filesystem::path(path).parent_path().string();
    MOONPIPE_RETURN_IF_ERROR(SyncFolder(parent.empty() ? "." : parent));
  }
  return journal;
}

Journal::~Journal() { ::close(fd_); }

absl::Status Journal::Recover() {
  MOONPIPE_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path_));
  size_t line_number = 0;
  size_t begin = 0;
  while (begin < bytes.size()) {
    ++line_number;
    const size_t newline = bytes.find('\n', begin);
    const bool is_last = newline == std::string::npos || newline + 1 == bytes.size();
    std::optional<JournalEntry> entry;
    if (newline != std::string::npos) entry = ParseLine(absl::string_view(bytes).substr(begin, newline - begin));
    if (!entry.has_value()) {
      if (!is_last) {
        return absl::DataLossError(absl::StrCat("journal ", path_, ": line ", line_number, " at byte ", begin,
                                                " is damaged and more lines follow; restore the file or move it away"));
      }
      break;
    }
    entries_.push_back(*std::move(entry));
    begin = newline + 1;
  }
  size_ = begin;
  torn_bytes_ = bytes.size() - begin;
  if (torn_bytes_ == 0) return absl::OkStatus();
  if (::ftruncate(fd_, static_cast<off_t>(size_)) != 0 || ::fdatasync(fd_) != 0)
    return SystemError("cannot cut the torn end of", path_);
  return absl::OkStatus();
}

absl::Status Journal::Append(const JournalEntry& entry) {
  MOONPIPE_RETURN_IF_ERROR(broken_);
  const std::string line = LineOf(entry);
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = ::write(fd_, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;
    done += static_cast<size_t>(n);
  }
  if (done == line.size() && ::fdatasync(fd_) == 0) {
    size_ += line.size();
    entries_.push_back(entry);
    return absl::OkStatus();
  }
  const absl::Status error = SystemError("cannot append to journal", path_);
  // A part of a line must not be followed by another one. After a failed sync nobody knows what is on the disk.
  if (done == line.size() || ::ftruncate(fd_, static_cast<off_t>(size_)) != 0) broken_ = error;
  return error;
}

const JournalEntry* Journal::Find(uint64_t step) const {
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    if (entry->step == step) return &*entry;
  }
  return nullptr;
}

absl::Status Journal::CheckReplay(uint64_t step, const std::string& manifest_digest) const {
  const JournalEntry* known = Find(step);
  if (known == nullptr || known->manifest_digest == manifest_digest) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "step ", step, " was made of other samples before: manifest ", absl::BytesToHexString(manifest_digest), " now, ",
      absl::BytesToHexString(known->manifest_digest), " in the journal; data files or data settings have changed"));
}

}  // namespace moonpipe
