#include "moonpipe/data/tar_index.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

constexpr uint64_t kBlock = 512;
constexpr uint64_t kMostMetadata = 1 << 20;

class SystemFile : public RandomAccessFile {
 public:
  SystemFile(std::string path, int fd, uint64_t size) : path_(std::move(path)), fd_(fd), size_(size) {}
  ~SystemFile() override { ::close(fd_); }

  absl::StatusOr<std::string> Read(uint64_t offset, uint64_t size) const override {
    std::string bytes(std::min(size, offset < size_ ? size_ - offset : 0), '\0');
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = ::pread(fd_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return absl::UnavailableError(absl::StrCat("cannot read ", path_, " at ", offset + done, ": ", std::strerror(errno)));
      if (n == 0) return absl::UnavailableError(absl::StrCat(path_, " has become shorter than ", size_, " bytes while it was read"));
      done += static_cast<size_t>(n);
    }
    return bytes;
  }
  uint64_t size() const override { return size_; }

 private:
  std::string path_;
  int fd_;
  uint64_t size_;
};

// A number field: octal text, or big-endian binary where the first bit is set.
std::optional<uint64_t> Number(absl::string_view field) {
  if (static_cast<unsigned char>(field[0]) == 0x80) {
    uint64_t value = 0;
    for (const char c : field.substr(field.size() - 8)) value = value << 8 | static_cast<unsigned char>(c);
    return value;
  }
  uint64_t value = 0;
  for (const char c : absl::StripAsciiWhitespace(field.substr(0, field.find('\0')))) {
    if (c < '0' || c > '7') return std::nullopt;
    value = value * 8 + static_cast<uint64_t>(c - '0');
  }
  return value;
}

bool ChecksumIsRight(absl::string_view header) {
  const std::optional<uint64_t> stored = Number(header.substr(148, 8));
  uint64_t sum = 8 * ' ';
  for (size_t i = 0; i < kBlock; ++i) {
    if (i < 148 || i >= 156) sum += static_cast<unsigned char>(header[i]);
  }
  return stored.has_value() && *stored == sum;
}

std::string Text(absl::string_view field) { return std::string(field.substr(0, field.find('\0'))); }

// What earlier headers say about the next member.
struct Overrides {
  std::optional<std::string> name;
  std::optional<uint64_t> size;
};

// Records "LENGTH KEY=VALUE\n". Unknown keys are of no interest here.
absl::Status ReadPax(absl::string_view records, Overrides& next) {
  while (!records.empty()) {
    const size_t space = records.find(' ');
    uint64_t length = 0;
    if (space == absl::string_view::npos || !absl::SimpleAtoi(records.substr(0, space), &length) || length <= space + 1 ||
        length > records.size()) {
      return absl::DataLossError("malformed pax record");
    }
    const absl::string_view record = records.substr(space + 1, length - space - 2);
    const size_t equals = record.find('=');
    if (equals == absl::string_view::npos) return absl::DataLossError("malformed pax record");
    const absl::string_view key = record.substr(0, equals), value = record.substr(equals + 1);
    if (key == "path") next.name = std::string(value);
    uint64_t size = 0;
    if (key == "size") {
      if (!absl::SimpleAtoi(value, &size)) return absl::DataLossError("malformed size in a pax record");
      next.size = size;
    }
    records.remove_prefix(length);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<RandomAccessFile>> OpenRandomAccessFile(const std::string& path) {
  // O_NONBLOCK so that a named pipe in the place of a file cannot hold the loader; it has no effect on regular files.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    const std::string message = absl::StrCat("cannot open ", path, ": ", std::strerror(error));
    return error == ENOENT || error == ENOTDIR ? absl::NotFoundError(message) : absl::UnavailableError(message);
  }
  struct stat status {};
  const bool known = ::fstat(fd, &status) == 0;
  if (!known || !S_ISREG(status.st_mode)) {
    ::close(fd);
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  return std::make_unique<SystemFile>(path, fd, static_cast<uint64_t>(status.st_size));
}

absl::StatusOr<std::vector<TarMember>> ReadTarIndex(const RandomAccessFile& file) {
  std::vector<TarMember> members;
  Overrides next;
  uint64_t offset = 0;
  while (offset < file.size()) {
    MOONPIPE_ASSIGN_OR_RETURN(const std::string header, file.Read(offset, kBlock));
    if (header.size() < kBlock) return absl::DataLossError(absl::StrCat("the file ends inside the header at byte ", offset));
    if (std::all_of(header.begin(), header.end(), [](char c) { return c == '\0'; })) break;
    const absl::string_view view = header;
    if (!ChecksumIsRight(view)) return absl::DataLossError(absl::StrCat("no tar header at byte ", offset, " (wrong checksum)"));
    const std::optional<uint64_t> written = Number(view.substr(124, 12));
    if (!written.has_value()) return absl::DataLossError(absl::StrCat("malformed size in the header at byte ", offset));
    const char type = header[156];
    const bool metadata = type == 'x' || type == 'g' || type == 'L' || type == 'K';
    const bool has_data = metadata || type == '0' || type == '\0' || type == '7';
    const uint64_t size = !metadata && next.size.has_value() ? *next.size : *written;
    const uint64_t data = offset + kBlock;
    if (has_data && size > file.size() - data) {
      return absl::DataLossError(absl::StrCat("the member at byte ", offset, " has ", size, " bytes, and ", file.size() - data,
                                              " are left: the file was cut off"));
    }
    offset = data + (has_data ? (size + kBlock - 1) / kBlock * kBlock : 0);
    if (metadata) {
      if (size > kMostMetadata) return absl::DataLossError(absl::StrCat("a name record of ", size, " bytes at byte ", data));
      MOONPIPE_ASSIGN_OR_RETURN(const std::string bytes, file.Read(data, size));
      if (type == 'x') MOONPIPE_RETURN_IF_ERROR(Annotate(ReadPax(bytes, next), absl::StrCat("at byte ", data)));
      if (type == 'L') next.name = Text(bytes);
      continue;
    }
    std::string name = Text(view.substr(0, 100));
    // Only the POSIX form has a prefix field; GNU keeps other things there.
    if (const std::string prefix = Text(view.substr(345, 155)); !prefix.empty() && view.substr(257, 6) == absl::string_view("ustar\0", 6)) {
      name = absl::StrCat(prefix, "/", name);
    }
    if (next.name.has_value()) name = *next.name;
    next = {};
    if (!has_data) continue;
    while (name.rfind("./", 0) == 0) name.erase(0, 2);
    members.push_back({std::move(name), data, size});
  }
  return members;
}

}  // namespace moonpipe
