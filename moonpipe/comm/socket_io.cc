#include "moonpipe/comm/socket_io.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

absl::Status PeerClosed(absl::string_view detail) {
  return absl::UnavailableError(absl::StrCat("peer closed the connection (", detail, ")"));
}

// The descriptor is non-blocking in effect through MSG_DONTWAIT, so these two mean "not now".
bool WouldBlock(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

bool MeansPeerGone(int error) { return error == EPIPE || error == ECONNRESET || error == ECONNABORTED || error == ENOTCONN; }

absl::Status SocketError(absl::string_view what, int error) {
  if (MeansPeerGone(error)) return PeerClosed(ErrnoText(error));
  return absl::UnavailableError(absl::StrCat(what, " failed: ", ErrnoText(error)));
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void UniqueFd::Reset() {
  // Not repeated on EINTR: Linux has freed the number by then, and another thread may hold it.
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::string ErrnoText(int error) {
  return absl::StrCat(std::generic_category().message(error), ", errno ", error);
}

Cancellation::Cancellation() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_.valid()) {
    reason_ = absl::ResourceExhaustedError(absl::StrCat("cannot open an eventfd: ", ErrnoText(errno)));
  }
}

void Cancellation::Cancel(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mutex_);
    if (!reason_.ok()) return;
    reason_ = reason;
  }
  Wake();
}

absl::Status Cancellation::reason() const {
  absl::MutexLock lock(&mutex_);
  return reason_;
}

void Cancellation::Wake() {
  const uint64_t one = 1;
  while (::write(event_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void Cancellation::Drain() {
  uint64_t count;
  while (::read(event_.get(), &count, sizeof count) < 0 && errno == EINTR) {
  }
}

absl::StatusOr<short> WaitForSocket(int fd, short events, Cancellation& cancellation, absl::Time deadline) {
  while (true) {
    MOONPIPE_RETURN_IF_ERROR(cancellation.reason());
    pollfd waits[2] = {{cancellation.fd(), POLLIN, 0}, {fd, events, 0}};
    timespec left;
    const timespec* timeout = nullptr;
    if (deadline != absl::InfiniteFuture()) {
      left = absl::ToTimespec(std::clamp(deadline - absl::Now(), absl::ZeroDuration(), absl::Hours(24)));
      timeout = &left;
    }
    const int ready = ::ppoll(waits, 2, timeout, nullptr);
    if (ready < 0 && errno != EINTR) return absl::InternalError(absl::StrCat("poll failed: ", ErrnoText(errno)));
    if (ready > 0 && waits[0].revents != 0) {
      // Drained before the reason is read, so that a cancellation in between is seen now or makes the next poll return.
      cancellation.Drain();
      if (const absl::Status reason = cancellation.reason(); !reason.ok()) {
        cancellation.Wake();  // Other threads may wait on the same one.
        return reason;
      }
    }
    if (ready > 0) return waits[1].revents;
    if (ready <= 0 && absl::Now() >= deadline) return absl::DeadlineExceededError("the socket was not ready in time");
  }
}

absl::Status WriteFully(int fd, absl::Span<iovec> parts, Cancellation& cancellation, absl::Time deadline) {
  while (true) {
    while (!parts.empty() && parts.front().iov_len == 0) parts.remove_prefix(1);
    if (parts.empty()) return absl::OkStatus();
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (!WouldBlock(errno)) {
        const int error = errno;
        MOONPIPE_RETURN_IF_ERROR(cancellation.reason());
        return SocketError("send", error);
      }
      MOONPIPE_RETURN_IF_ERROR(WaitForSocket(fd, POLLOUT, cancellation, deadline).status());
      continue;
    }
    size_t written = static_cast<size_t>(sent);
    for (size_t i = 0; written > 0; ++i) {
      const size_t part = std::min(written, parts[i].iov_len);
      parts[i].iov_base = static_cast<char*>(parts[i].iov_base) + part;
      parts[i].iov_len -= part;
      written -= part;
    }
  }
}

absl::StatusOr<size_t> ReadSome(int fd, void* data, size_t bytes, Cancellation& cancellation, absl::Time deadline) {
  while (true) {
    const ssize_t got = ::recv(fd, data, bytes, MSG_DONTWAIT);
    if (got > 0) return static_cast<size_t>(got);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && WouldBlock(errno)) {
      MOONPIPE_RETURN_IF_ERROR(WaitForSocket(fd, POLLIN, cancellation, deadline).status());
      continue;
    }
    const int error = errno;
    // An abort shuts the socket down, which reads as an end of stream: its reason is the truth.
    MOONPIPE_RETURN_IF_ERROR(cancellation.reason());
    if (got == 0) return 0;
    return SocketError("receive", error);
  }
}

absl::Status ReadFully(int fd, void* data, size_t bytes, Cancellation& cancellation, absl::Time deadline) {
  for (size_t done = 0; done < bytes;) {
    MOONPIPE_ASSIGN_OR_RETURN(const size_t got,
                              ReadSome(fd, static_cast<char*>(data) + done, bytes - done, cancellation, deadline));
    if (got == 0) return PeerClosed(absl::StrCat("end of stream after ", done, " of ", bytes, " bytes"));
    done += got;
  }
  return absl::OkStatus();
}

}  // namespace moonpipe
