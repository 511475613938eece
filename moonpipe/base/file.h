// Whole files and durable writes.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moonpipe {

// The bytes of a file. NOT_FOUND or INTERNAL with the path and the system's reason.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// Writes beside `path`, syncs, and renames into place, so that a reader sees the old bytes or the new, never a part.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes);

// Syncs a folder, which makes renames in it durable.
absl::Status SyncFolder(const std::string& path);

// SHA-256 in hexadecimal, of bytes or of a file read in pieces.
std::string Sha256Hex(absl::string_view bytes);
absl::StatusOr<std::string> Sha256HexOfFile(const std::string& path);

}  // namespace moonpipe
