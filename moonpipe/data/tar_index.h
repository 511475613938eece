// The table of contents of a tar file: names, places and sizes of its regular files, read once, so that any member can be
// fetched by itself. Understands ustar, GNU long names and base-256 sizes, and pax path and size records; no compression.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace moonpipe {

// A file that is read at any place. Reading is safe from several threads.
class RandomAccessFile {
 public:
  virtual ~RandomAccessFile() = default;
  // `size` bytes from `offset`; fewer only at the end of the file. UNAVAILABLE for what the system refuses.
  virtual absl::StatusOr<std::string> Read(uint64_t offset, uint64_t size) const = 0;
  virtual uint64_t size() const = 0;
};

// Opens files; tests replace it. NOT_FOUND for a missing file.
using FileOpener = std::function<absl::StatusOr<std::unique_ptr<RandomAccessFile>>(const std::string& path)>;
absl::StatusOr<std::unique_ptr<RandomAccessFile>> OpenRandomAccessFile(const std::string& path);

struct TarMember {
  std::string name;  // without a leading "./"
  uint64_t offset = 0;
  uint64_t size = 0;
};

// Members in order. DATA_LOSS with the offset for a header whose checksum is wrong or a member that ends after the file (a file
// that was cut off).
absl::StatusOr<std::vector<TarMember>> ReadTarIndex(const RandomAccessFile& file);

}  // namespace moonpipe
