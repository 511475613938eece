#include "moonpipe/base/file.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

absl::Status SystemError(absl::string_view action, const std::string& path) {
  const int error = errno;
  const std::string message = absl::StrCat(action, " ", path, ": ", std::strerror(error));
  return error == ENOENT ? absl::NotFoundError(message) : absl::InternalError(message);
}

class FileDescriptor {
 public:
  FileDescriptor(const std::string& path, int flags, mode_t mode = 0644) : fd_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) { EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr); }
  void Update(const void* data, size_t size) { EVP_DigestUpdate(context_.get(), data, size); }
  std::string Hex() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    EVP_DigestFinal_ex(context_.get(), digest, &size);
    return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), size));
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

// Calls `take` with each piece of the file.
template <typename Take>
absl::Status ReadInPieces(const std::string& path, Take take) {
  FileDescriptor file(path, O_RDONLY);
  if (file.get() < 0) return SystemError("cannot open", path);
  std::vector<char> piece(1 << 20);
  while (true) {
    const ssize_t n = ::read(file.get(), piece.data(), piece.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return SystemError("cannot read", path);
    if (n == 0) return absl::OkStatus();
    take(piece.data(), static_cast<size_t>(n));
  }
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::string bytes;
  MOONPIPE_RETURN_IF_ERROR(ReadInPieces(path, [&](const char* data, size_t size) { bytes.append(data, size); }));
  return bytes;
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes) {
  const std::string temporary = absl::StrCat(path, ".tmp.", ::getpid());
  {
    FileDescriptor file(temporary, O_WRONLY | O_CREAT | O_TRUNC);
    if (file.get() < 0) return SystemError("cannot create", temporary);
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = ::write(file.get(), bytes.data() + done, bytes.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return SystemError("cannot write", temporary);
      done += static_cast<size_t>(n);
    }
    if (::fsync(file.get()) != 0) return SystemError("cannot sync", temporary);
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) return SystemError("cannot rename into place", path);
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return SyncFolder(parent.empty() ? "." : parent);
}

absl::Status SyncFolder(const std::string& path) {
  FileDescriptor folder(path, O_RDONLY | O_DIRECTORY);
  if (folder.get() < 0) return SystemError("cannot open folder", path);
  if (::fsync(folder.get()) != 0) return SystemError("cannot sync folder", path);
  return absl::OkStatus();
}

std::string Sha256Hex(absl::string_view bytes) {
  Sha256 hash;
  hash.Update(bytes.data(), bytes.size());
  return hash.Hex();
}

absl::StatusOr<std::string> Sha256HexOfFile(const std::string& path) {
  Sha256 hash;
  MOONPIPE_RETURN_IF_ERROR(ReadInPieces(path, [&](const char* data, size_t size) { hash.Update(data, size); }));
  return hash.Hex();
}

}  // namespace moonpipe
