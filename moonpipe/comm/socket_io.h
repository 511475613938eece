// Small tools over sockets that the edges share: an owned descriptor, a signal that ends a poll, and transfers that wait for the
// socket, the signal or a deadline, whichever comes first. Nothing here raises SIGPIPE or stops at EINTR.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace moonpipe {

// Closes its descriptor once.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }
  void Reset();

 private:
  int fd_ = -1;
};

// "connection reset by peer" for an errno value, with its number.
std::string ErrnoText(int error);

// Ends waits on sockets from another thread, for good. Thread-safe. The first reason stays.
class Cancellation {
 public:
  Cancellation();
  // `reason` must not be OK.
  void Cancel(const absl::Status& reason);
  // OK until cancelled.
  absl::Status reason() const;
  // Readable once cancelled or woken; -1 if the process has no descriptor left, which `reason` then tells.
  int fd() const { return event_.get(); }
  // Makes `fd` readable without cancelling, so that a poll looks at its owner's state again; Drain takes that back.
  void Wake();
  void Drain();

 private:
  UniqueFd event_;
  mutable absl::Mutex mutex_;
  absl::Status reason_ ABSL_GUARDED_BY(mutex_);
};

// Blocks until `fd` has one of `events` (or an error or hang-up) and returns what it has, or 0 after a mere Wake. DEADLINE_EXCEEDED,
// or the reason of `cancellation`.
absl::StatusOr<short> WaitForSocket(int fd, short events, Cancellation& cancellation, absl::Time deadline);

// Writes every byte of `parts` (changed on the way). UNAVAILABLE "peer closed the connection (...)" when it has gone.
absl::Status WriteFully(int fd, absl::Span<iovec> parts, Cancellation& cancellation, absl::Time deadline);

// Reads at least one and at most `bytes` bytes and returns how many; 0 is the end of the stream.
absl::StatusOr<size_t> ReadSome(int fd, void* data, size_t bytes, Cancellation& cancellation, absl::Time deadline);

// Reads exactly `bytes` bytes. UNAVAILABLE with both counts if the stream ends before.
absl::Status ReadFully(int fd, void* data, size_t bytes, Cancellation& cancellation, absl::Time deadline);

}  // namespace moonpipe
