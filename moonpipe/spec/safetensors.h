// The safetensors file format, read through a memory map and written as a stream. No LibTorch: tensors are a name, a
// dtype, a shape and bytes (little-endian, row-major), so that planner, loader, exporter and tests share one reader.
//
//   MOONPIPE_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open("model.safetensors"));
//   MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* weight, file.Find("lm_head.weight"));
//
// A file is: u64 header length, JSON header, data. The header maps each name to {"dtype", "shape", "data_offsets":
// [begin, end]}; the offsets are relative to the data, which they must cover without holes or overlaps.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moonpipe {

enum class StoredType { kF32, kBF16, kF16, kF64, kI64, kI32, kU8, kI8, kBool, kF8E4M3 };

// As in the header: F32, BF16, F16, F64, I64, I32, U8, I8, BOOL, F8_E4M3.
absl::string_view StoredTypeName(StoredType type);
uint64_t StoredTypeBytes(StoredType type);

// A tensor in a file, or one to be written. Does not own its bytes.
struct StoredTensor {
  std::string name;
  StoredType type = StoredType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;

  uint64_t num_elements() const;
  uint64_t num_bytes() const { return num_elements() * StoredTypeBytes(type); }
  // "F32[2, 3]"
  std::string ToString() const;
};

// A mapped file. The pointers of its tensors live as long as it does; moving it keeps them valid. Safe to read from
// many threads.
class SafetensorsFile {
 public:
  // Maps the file and checks its whole header; bytes of tensors are not touched. NOT_FOUND if there is none;
  // INVALID_ARGUMENT for a damaged or cut file, with the path, the tensor and both numbers.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  SafetensorsFile(SafetensorsFile&& other) noexcept = default;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept = default;

  // Sorted by name.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  // NOT_FOUND names the file and the nearest name in it. The pointer lives as long as this object.
  absl::StatusOr<const StoredTensor*> Find(absl::string_view name) const;
  bool Contains(absl::string_view name) const;
  // The header's `__metadata__`.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }
  uint64_t file_bytes() const { return file_bytes_; }

 private:
  SafetensorsFile() = default;
  absl::Status ParseHeader(absl::string_view header, const char* data, uint64_t data_bytes);

  std::string path_;
  uint64_t file_bytes_ = 0;
  std::shared_ptr<const void> mapping_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Writes the tensors beside `path`, syncs, and renames into place. The given order is kept among tensors of one element
// size; wider elements come first, so that every tensor is aligned in a mapped file. Metadata is {"format": "pt"} and
// `metadata`. Returns the size of the file. INVALID_ARGUMENT for a name given twice, an empty name or a negative
// dimension; INTERNAL with the system's reason (the old file, if any, is then still there). The caller syncs the
// folder.
absl::StatusOr<uint64_t> WriteSafetensors(const std::string& path, const std::vector<StoredTensor>& tensors,
                                          const std::map<std::string, std::string>& metadata = {});

// The same for tensors whose bytes are made one after another: `bytes_of` is called once a tensor, in the order of the file, and what it
// returns is used until its next call. Its error ends the write.
using TensorBytes = std::function<absl::StatusOr<const void*>(const StoredTensor& tensor)>;
absl::StatusOr<uint64_t> WriteSafetensors(const std::string& path, const std::vector<StoredTensor>& tensors,
                                          const std::map<std::string, std::string>& metadata, const TensorBytes& bytes_of);

// All weight files of a Hugging Face model folder: the shards that model.safetensors.index.json names, or
// model.safetensors.
class ModelFolder {
 public:
  // Opens every shard. NOT_FOUND when the folder has neither; INVALID_ARGUMENT when the index and its shards name
  // different tensors (lists the first few of each side), when a shard's name leaves the folder, or when a shard is
  // damaged.
  static absl::StatusOr<ModelFolder> Open(const std::string& folder);

  // Sorted by name.
  std::vector<std::string> Names() const;
  bool Contains(absl::string_view name) const { return file_of_.find(name) != file_of_.end(); }
  // NOT_FOUND names the folder and the nearest name. The pointer lives as long as this object.
  absl::StatusOr<const StoredTensor*> Find(absl::string_view name) const;
  // File name of the shard that holds the tensor; empty when none does.
  std::string FileOf(absl::string_view name) const;
  const std::vector<SafetensorsFile>& files() const { return files_; }
  const std::string& path() const { return folder_; }

 private:
  std::string folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t, std::less<>> file_of_;
};

}  // namespace moonpipe
