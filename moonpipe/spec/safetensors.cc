#include "moonpipe/spec/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/fault_point.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/nearest_name.h"
#include "moonpipe/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensor bytes are used as they lie in the file");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr uint64_t kLengthBytes = 8;
constexpr absl::string_view kMetadataKey = "__metadata__";

struct TypeInfo {
  StoredType type;
  absl::string_view name;
  uint64_t bytes;
};
constexpr TypeInfo kTypes[] = {
    {StoredType::kF32, "F32", 4},        {StoredType::kBF16, "BF16", 2}, {StoredType::kF16, "F16", 2},
    {StoredType::kF64, "F64", 8},        {StoredType::kI64, "I64", 8},   {StoredType::kI32, "I32", 4},
    {StoredType::kU8, "U8", 1},          {StoredType::kI8, "I8", 1},     {StoredType::kBool, "BOOL", 1},
    {StoredType::kF8E4M3, "F8_E4M3", 1},
};

const TypeInfo& InfoOf(StoredType type) {
  for (const TypeInfo& info : kTypes) {
    if (info.type == type) return info;
  }
  return kTypes[0];
}

std::optional<StoredType> TypeOf(absl::string_view name) {
  for (const TypeInfo& info : kTypes) {
    if (info.name == name) return info.type;
  }
  return std::nullopt;
}

absl::Status SystemError(absl::string_view action, const std::string& path) {
  const int error = errno;
  const std::string message = absl::StrCat(action, " ", path, ": ", std::strerror(error));
  return error == ENOENT ? absl::NotFoundError(message) : absl::InternalError(message);
}

// The product of the shape and the element size, or nothing when it does not fit into 64 bits.
std::optional<uint64_t> CheckedBytes(const std::vector<int64_t>& shape, uint64_t element_bytes) {
  uint64_t bytes = element_bytes;
  for (int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(dim), &bytes)) return std::nullopt;
  }
  return bytes;
}

// Parses an object and refuses a key that stands twice in it, which the JSON library would let pass silently.
absl::StatusOr<json> ParseWithoutDuplicates(absl::string_view text) {
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  auto watch = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == json::parse_event_t::key && !keys.back().insert(parsed.get_ref<const std::string&>()).second &&
               duplicate.empty()) {
      duplicate = parsed.get<std::string>();
    }
    return true;
  };
  json parsed;
  try {
    parsed = json::parse(text.begin(), text.end(), watch);
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("not JSON: ", error.what()));
  }
  if (!duplicate.empty()) return absl::InvalidArgumentError(absl::StrCat("the name ", duplicate, " stands twice"));
  if (!parsed.is_object()) return absl::InvalidArgumentError("not a JSON object");
  return parsed;
}

// A list of non-negative integers that fit into int64.
std::optional<std::vector<int64_t>> ReadIntegers(const json& value) {
  if (!value.is_array()) return std::nullopt;
  std::vector<int64_t> numbers;
  for (const json& entry : value) {
    if (!entry.is_number_unsigned()) return std::nullopt;
    const uint64_t number = entry.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    numbers.push_back(static_cast<int64_t>(number));
  }
  return numbers;
}

struct PlacedTensor {
  StoredTensor tensor;
  uint64_t begin = 0;
  uint64_t end = 0;
};

absl::StatusOr<PlacedTensor> ReadEntry(const std::string& name, const json& entry) {
  auto wrong = [&](auto... words) { return absl::InvalidArgumentError(absl::StrCat("tensor ", name, ": ", words...)); };
  if (!entry.is_object()) return wrong("not a JSON object");
  for (const char* field : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(field)) return wrong("has no ", field);
  }
  if (entry.size() != 3) return wrong("has ", entry.size(), " fields, 3 are known: dtype, shape, data_offsets");
  PlacedTensor placed;
  placed.tensor.name = name;
  if (!entry["dtype"].is_string()) return wrong("dtype is not a string");
  const std::string type_name = entry["dtype"].get<std::string>();
  const std::optional<StoredType> type = TypeOf(type_name);
  if (!type.has_value()) {
    return wrong(
        "dtype ", type_name, " is not supported; known are ",
        absl::StrJoin(kTypes, ", ", [](std::string* out, const TypeInfo& info) { absl::StrAppend(out, info.name); }));
  }
  placed.tensor.type = *type;
  auto shape = ReadIntegers(entry["shape"]);
  if (!shape.has_value()) return wrong("shape ", entry["shape"].dump(), " is not a list of non-negative integers");
  placed.tensor.shape = *std::move(shape);
  const auto offsets = ReadIntegers(entry["data_offsets"]);
  if (!offsets.has_value() || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1]) {
    return wrong("data_offsets ", entry["data_offsets"].dump(), " are not two ascending integers");
  }
  placed.begin = static_cast<uint64_t>((*offsets)[0]);
  placed.end = static_cast<uint64_t>((*offsets)[1]);
  const auto bytes = CheckedBytes(placed.tensor.shape, StoredTypeBytes(*type));
  if (!bytes.has_value()) return wrong("shape ", entry["shape"].dump(), " overflows 64 bits");
  if (*bytes != placed.end - placed.begin) {
    return wrong(placed.tensor.ToString(), " needs ", *bytes, " bytes, its data_offsets hold ",
                 placed.end - placed.begin);
  }
  return placed;
}

// Writes all bytes; write() may take a part, and never more than 2 GiB.
absl::Status WriteAll(int fd, const void* data, uint64_t bytes, const std::string& path) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const size_t piece = static_cast<size_t>(std::min<uint64_t>(bytes, 1U << 26));
    const ssize_t n = ::write(fd, next, piece);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return SystemError("cannot write", path);
    next += n;
    bytes -= static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

struct ByName {
  bool operator()(const StoredTensor& tensor, absl::string_view name) const { return tensor.name < name; }
  bool operator()(absl::string_view name, const StoredTensor& tensor) const { return name < tensor.name; }
};

std::string FirstFew(const std::vector<std::string>& names) {
  const size_t shown = std::min<size_t>(names.size(), 3);
  std::string text = absl::StrJoin(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), ", ");
  if (names.size() > shown) absl::StrAppend(&text, ", and ", names.size() - shown, " more");
  return text;
}

}  // namespace

absl::string_view StoredTypeName(StoredType type) { return InfoOf(type).name; }
uint64_t StoredTypeBytes(StoredType type) { return InfoOf(type).bytes; }

uint64_t StoredTensor::num_elements() const {
  uint64_t count = 1;
  for (int64_t dim : shape) count *= static_cast<uint64_t>(dim);
  return count;
}

std::string StoredTensor::ToString() const {
  return absl::StrCat(StoredTypeName(type), "[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return SystemError("cannot open", path);
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  SafetensorsFile file;
  file.path_ = path;
  file.file_bytes_ = static_cast<uint64_t>(info.st_size);
  if (file.file_bytes_ < kLengthBytes) {
    ::close(fd);
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": has ", file.file_bytes_, " bytes, a safetensors file begins with ", kLengthBytes));
  }
  const size_t size = static_cast<size_t>(file.file_bytes_);
  void* mapped = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const absl::Status map_error = mapped == MAP_FAILED ? SystemError("cannot map", path) : absl::OkStatus();
  ::close(fd);
  MOONPIPE_RETURN_IF_ERROR(map_error);
  file.mapping_ = std::shared_ptr<const void>(mapped, [mapped, size](const void*) { ::munmap(mapped, size); });

  const char* bytes = static_cast<const char*>(mapped);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes, kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": header of ", header_bytes, " bytes, at most ", kMaxHeaderBytes, " are allowed"));
  }
  if (header_bytes > file.file_bytes_ - kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": header of ", header_bytes, " bytes in a file that has ",
                                                   file.file_bytes_ - kLengthBytes,
                                                   " after the length; the file is cut off"));
  }
  const absl::Status parsed =
      file.ParseHeader(absl::string_view(bytes + kLengthBytes, static_cast<size_t>(header_bytes)),
                       bytes + kLengthBytes + header_bytes, file.file_bytes_ - kLengthBytes - header_bytes);
  if (!parsed.ok()) return Annotate(parsed, path);
  return file;
}

absl::Status SafetensorsFile::ParseHeader(absl::string_view header, const char* data, uint64_t data_bytes) {
  auto parsed = ParseWithoutDuplicates(header);
  if (!parsed.ok()) return Annotate(parsed.status(), "header");
  std::vector<PlacedTensor> placed;
  for (const auto& [name, entry] : parsed->items()) {
    if (name == kMetadataKey) {
      if (!entry.is_object()) return absl::InvalidArgumentError("__metadata__ is not a JSON object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string())
          return absl::InvalidArgumentError(absl::StrCat("__metadata__.", key, " is not a string"));
        metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    MOONPIPE_ASSIGN_OR_RETURN(PlacedTensor tensor, ReadEntry(name, entry));
    placed.push_back(std::move(tensor));
  }
  std::sort(placed.begin(), placed.end(), [](const PlacedTensor& a, const PlacedTensor& b) {
    return std::make_pair(a.begin, a.end) < std::make_pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  for (PlacedTensor& entry : placed) {
    if (entry.begin != covered) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", entry.tensor.name, ": data begins at byte ",
                                                     entry.begin, ", the tensor before ends at ", covered,
                                                     entry.begin > covered ? "; there is a hole" : "; they overlap"));
    }
    if (entry.end > data_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", entry.tensor.name, ": data ends at byte ", entry.end,
                                                     ", the file has ", data_bytes,
                                                     " bytes of data; the file is cut off"));
    }
    covered = entry.end;
    entry.tensor.data = data + entry.begin;
    tensors_.push_back(std::move(entry.tensor));
  }
  if (covered != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the file has ", data_bytes, " bytes of data, its tensors cover ", covered));
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const StoredTensor& a, const StoredTensor& b) { return a.name < b.name; });
  return absl::OkStatus();
}

bool SafetensorsFile::Contains(absl::string_view name) const {
  return std::binary_search(tensors_.begin(), tensors_.end(), name, ByName());
}

absl::StatusOr<const StoredTensor*> SafetensorsFile::Find(absl::string_view name) const {
  const auto found = std::lower_bound(tensors_.begin(), tensors_.end(), name, ByName());
  if (found != tensors_.end() && found->name == name) return &*found;
  std::vector<std::string> names;
  for (const StoredTensor& tensor : tensors_) names.push_back(tensor.name);
  const std::vector<std::string> nearest = NearestNames(name, names);
  return absl::NotFoundError(absl::StrCat(path_, ": no tensor ", name, " among ", tensors_.size(),
                                          nearest.empty() ? "" : absl::StrCat("; nearest is ", nearest[0])));
}

absl::StatusOr<uint64_t> WriteSafetensors(const std::string& path, const std::vector<StoredTensor>& tensors,
                                          const std::map<std::string, std::string>& metadata) {
  return WriteSafetensors(path, tensors, metadata, [&](const StoredTensor& tensor) -> absl::StatusOr<const void*> {
    if (tensor.num_elements() > 0 && tensor.data == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", tensor.name, " has no data"));
    }
    return tensor.data;
  });
}

absl::StatusOr<uint64_t> WriteSafetensors(const std::string& path, const std::vector<StoredTensor>& tensors,
                                          const std::map<std::string, std::string>& metadata, const TensorBytes& bytes_of) {
  std::vector<const StoredTensor*> order;
  for (const StoredTensor& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const StoredTensor* a, const StoredTensor* b) {
    return StoredTypeBytes(a->type) > StoredTypeBytes(b->type);
  });

  nlohmann::ordered_json header;
  header[std::string(kMetadataKey)] = {{"format", "pt"}};
  for (const auto& [key, value] : metadata) header[std::string(kMetadataKey)][key] = value;
  std::set<absl::string_view> names;
  uint64_t offset = 0;
  for (const StoredTensor* tensor : order) {
    if (tensor->name.empty() || tensor->name == kMetadataKey) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": \"", tensor->name, "\" cannot name a tensor"));
    }
    if (!names.insert(tensor->name).second) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", tensor->name, " is given twice"));
    }
    const auto bytes = CheckedBytes(tensor->shape, StoredTypeBytes(tensor->type));
    if (!bytes.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": tensor ", tensor->name, " has the impossible shape ", tensor->ToString()));
    }
  }
  // A plain object would be searched linearly for every insertion; the names are known to be unique, so they are
  // appended.
  auto& entries = header.get_ref<nlohmann::ordered_json::object_t&>();
  for (const StoredTensor* tensor : order) {
    const uint64_t end = offset + tensor->num_bytes();
    nlohmann::ordered_json entry;
    entry["dtype"] = std::string(StoredTypeName(tensor->type));
    entry["shape"] = tensor->shape;
    entry["data_offsets"] = {offset, end};
    entries.push_back({tensor->name, std::move(entry)});
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a name or metadata is not UTF-8: ", error.what()));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": header of ", text.size(), " bytes, at most ",
                                                   kMaxHeaderBytes, " are allowed; write more shards"));
  }

  const std::string temporary = absl::StrCat(path, ".tmp.", ::getpid());
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return SystemError("cannot create", temporary);
  const uint64_t length = text.size();
  absl::Status status = WriteAll(fd, &length, kLengthBytes, temporary);
  status.Update(WriteAll(fd, text.data(), text.size(), temporary));
  static std::atomic<uint64_t> files = 0;
  const uint64_t file_number = ++files;
  uint64_t written = 0;
  for (const StoredTensor* tensor : order) {
    if (!status.ok()) break;
    const absl::StatusOr<const void*> data = bytes_of(*tensor);
    status = data.ok() ? WriteAll(fd, *data, tensor->num_bytes(), temporary) : data.status();
    written += tensor->num_bytes();
    if (2 * written >= offset) status.Update(FaultPoint("shard_half", file_number));
  }
  if (status.ok() && ::fsync(fd) != 0) status = SystemError("cannot sync", temporary);
  if (::close(fd) != 0 && status.ok()) status = SystemError("cannot close", temporary);
  if (status.ok() && std::rename(temporary.c_str(), path.c_str()) != 0)
    status = SystemError("cannot rename into place", path);
  if (!status.ok()) {
    ::unlink(temporary.c_str());
    return status;
  }
  return kLengthBytes + text.size() + offset;
}

absl::StatusOr<ModelFolder> ModelFolder::Open(const std::string& folder) {
  ModelFolder result;
  result.folder_ = folder;
  const std::string index_path = absl::StrCat(folder, "/model.safetensors.index.json");
  std::map<std::string, std::string> weight_map;
  std::set<std::string> file_names;
  const absl::StatusOr<std::string> index = ReadFile(index_path);
  const bool has_index = index.ok();
  if (has_index) {
    auto parsed = ParseWithoutDuplicates(*index);
    if (!parsed.ok()) return Annotate(parsed.status(), index_path);
    if (!parsed->contains("weight_map") || !(*parsed)["weight_map"].is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(index_path, ": has no object weight_map"));
    }
    for (const auto& [name, file] : (*parsed)["weight_map"].items()) {
      const std::string file_name = file.is_string() ? file.get<std::string>() : "";
      if (file_name.empty() || file_name.find('/') != std::string::npos || file_name == "..") {
        return absl::InvalidArgumentError(absl::StrCat(index_path, ": tensor ", name, " lies in ", file.dump(),
                                                       ", which is not the name of a file in the folder"));
      }
      weight_map[name] = file_name;
      file_names.insert(file_name);
    }
  } else if (!absl::IsNotFound(index.status())) {
    return index.status();
  } else if (std::error_code ignored; std::filesystem::exists(absl::StrCat(folder, "/model.safetensors"), ignored)) {
    file_names.insert("model.safetensors");
  } else {
    return absl::NotFoundError(
        absl::StrCat(folder, ": has neither model.safetensors.index.json nor model.safetensors"));
  }

  std::vector<std::string> not_in_index;
  for (const std::string& file_name : file_names) {
    MOONPIPE_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(absl::StrCat(folder, "/", file_name)));
    for (const StoredTensor& tensor : file.tensors()) {
      const auto expected = weight_map.find(tensor.name);
      if (has_index && (expected == weight_map.end() || expected->second != file_name)) {
        not_in_index.push_back(absl::StrCat(tensor.name, " of ", file_name));
        continue;
      }
      result.file_of_[tensor.name] = result.files_.size();
    }
    result.files_.push_back(std::move(file));
  }
  std::vector<std::string> not_in_shards;
  for (const auto& [name, file_name] : weight_map) {
    if (!result.Contains(name)) not_in_shards.push_back(absl::StrCat(name, " of ", file_name));
  }
  if (!not_in_index.empty() || !not_in_shards.empty()) {
    std::string message = absl::StrCat(index_path, ": the index and its shards differ");
    if (!not_in_shards.empty()) absl::StrAppend(&message, "; no shard holds ", FirstFew(not_in_shards));
    if (!not_in_index.empty()) absl::StrAppend(&message, "; the index lacks ", FirstFew(not_in_index));
    return absl::InvalidArgumentError(message);
  }
  return result;
}

std::vector<std::string> ModelFolder::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : file_of_) names.push_back(name);
  return names;
}

absl::StatusOr<const StoredTensor*> ModelFolder::Find(absl::string_view name) const {
  const auto found = file_of_.find(name);
  if (found != file_of_.end()) return files_[found->second].Find(name);
  const std::vector<std::string> nearest = NearestNames(name, Names());
  return absl::NotFoundError(absl::StrCat(folder_, ": no tensor ", name, " among ", file_of_.size(),
                                          nearest.empty() ? "" : absl::StrCat("; nearest is ", nearest[0])));
}

std::string ModelFolder::FileOf(absl::string_view name) const {
  const auto found = file_of_.find(name);
  if (found == file_of_.end()) return "";
  return std::filesystem::path(files_[found->second].path()).filename().string();
}

}  // namespace moonpipe
