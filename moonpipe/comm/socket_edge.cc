#include "moonpipe/comm/socket_edge.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/comm/crc32c.h"
#include "moonpipe/comm/frame.h"

namespace moonpipe {
namespace {

// Checksumming and copying go hand in hand in pieces that stay in the second-level cache.
constexpr size_t kPieceBytes = size_t{256} << 10;

// Lets a Unix socket's writer run ahead while the reader checksums a piece.
constexpr int kSocketBufferBytes = 1 << 20;

absl::Status CheckOptions(const UniqueFd& socket, const SocketEdgeOptions& options) {
  if (!socket.valid()) return absl::InvalidArgumentError(absl::StrCat("edge ", options.name, ": the socket is not open"));
  if (options.capacity == 0) {
    return absl::InvalidArgumentError(absl::StrCat("edge ", options.name, ": capacity is 0, must be at least 1"));
  }
  return absl::OkStatus();
}

absl::Status NoThread(const std::string& name, const std::system_error& error) {
  return absl::ResourceExhaustedError(absl::StrCat("edge ", name, ": cannot start a thread: ", error.what()));
}

// An extent of an infinite wait cannot be told.
std::string Waited(absl::Time since) { return absl::FormatDuration(absl::Trunc(absl::Now() - since, absl::Milliseconds(1))); }

class SocketSendEdge : public SendEdge {
 public:
  SocketSendEdge(UniqueFd socket, SocketEdgeOptions options) : options_(std::move(options)), socket_(std::move(socket)) {}

  absl::Status Start() {
    MOONPIPE_RETURN_IF_ERROR(Annotate(cancellation_.reason(), prefix()));
    try {
      writer_ = std::thread([this] { WriteLoop(); });
    } catch (const std::system_error& error) {
      return NoThread(options_.name, error);
    }
    return absl::OkStatus();
  }

  ~SocketSendEdge() override {
    Abort(absl::CancelledError("the edge was destroyed"));
    if (writer_.joinable()) writer_.join();
  }

  absl::Status Send(const MessageHeader& header, Payload payload, absl::Time deadline) override {
    auto frame = EncodeFrameHeader(header);
    if (!frame.ok()) return Annotate(frame.status(), prefix());
    if (payload.bytes != header.payload_bytes()) {
      return absl::InvalidArgumentError(absl::StrCat(prefix(), ": payload has ", payload.bytes, " bytes but ",
                                                     header.ToString(), " makes ", header.payload_bytes()));
    }
    if (payload.bytes > options_.max_message_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(prefix(), ": message of ", payload.bytes, " bytes is over the limit of ",
                                                     options_.max_message_bytes, " bytes: ", header.ToString(),
                                                     "; raise the edge's max_message_bytes or send smaller microbatches"));
    }
    const absl::Time begin = absl::Now();
    absl::ReleasableMutexLock lock(&mutex_);
    mutex_.AwaitWithDeadline(absl::Condition(this, &SocketSendEdge::MaySendLocked), deadline);
    if (!failure_.ok()) return failure_;
    if (under_way_ >= options_.capacity) {
      const absl::Status failure = absl::DeadlineExceededError(
          absl::StrCat(prefix(), ": waited ", Waited(begin), " to send ", header.ToString(), "; ", under_way_, " of ",
                       options_.capacity, " messages are under way and the peer does not read on"));
      lock.Release();
      return Fail(failure);
    }
    queue_.push_back({*frame, std::move(payload)});
    ++under_way_;
    const bool wake = writer_idle_;
    writer_idle_ = false;
    lock.Release();
    if (wake) cancellation_.Wake();
    return absl::OkStatus();
  }

  absl::Status Flush(absl::Time deadline) override {
    const absl::Time begin = absl::Now();
    absl::ReleasableMutexLock lock(&mutex_);
    mutex_.AwaitWithDeadline(absl::Condition(this, &SocketSendEdge::FlushedLocked), deadline);
    if (aborted_) return failure_;
    // A peer that leaves after it was given everything is no failure of what was handed over.
    if (under_way_ == 0) return absl::OkStatus();
    if (!failure_.ok()) return failure_;
    const absl::Status failure = absl::DeadlineExceededError(absl::StrCat(
        prefix(), ": waited ", Waited(begin), " to flush; ", under_way_, " messages are not yet written"));
    lock.Release();
    return Fail(failure);
  }

  void Abort(const absl::Status& reason) override {
    {
      absl::MutexLock lock(&mutex_);
      aborted_ = true;
      if (failure_.ok()) failure_ = Annotate(reason.ok() ? absl::AbortedError("aborted") : reason, prefix());
    }
    Stop();
  }

  EdgeCounters counters() const override {
    absl::MutexLock lock(&mutex_);
    return counters_;
  }
  const std::string& name() const override { return options_.name; }
  std::string transport() const override { return options_.transport; }

 private:
  struct Item {
    FrameHeader frame;
    Payload payload;
  };

  std::string prefix() const { return absl::StrCat("edge ", options_.name); }
  bool MaySendLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !failure_.ok() || under_way_ < options_.capacity;
  }
  bool FlushedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !failure_.ok() || under_way_ == 0; }

  // Returns the first failure, which may be an earlier one.
  absl::Status Fail(const absl::Status& failure) {
    absl::Status first;
    {
      absl::MutexLock lock(&mutex_);
      if (failure_.ok()) failure_ = failure;
      first = failure_;
    }
    Stop();
    return first;
  }

  // Ends the writer and tells the peer. The descriptor is closed only after the thread is joined: its number must not be reused
  // under the thread's feet.
  void Stop() {
    std::deque<Item> dropped;
    absl::Status reason;
    {
      absl::MutexLock lock(&mutex_);
      dropped.swap(queue_);
      reason = failure_;
    }
    cancellation_.Cancel(reason);
    ::shutdown(socket_.get(), SHUT_RDWR);
  }

  void WriteLoop() {
    while (true) {
      Item item;
      bool has_item = false;
      {
        absl::MutexLock lock(&mutex_);
        if (!failure_.ok()) return;
        if (!queue_.empty()) {
          item = std::move(queue_.front());
          queue_.pop_front();
          has_item = true;
        }
        writer_idle_ = !has_item;
      }
      if (const absl::Status status = has_item ? Write(item) : WaitForWork(); !status.ok()) {
        (void)Fail(Annotate(status, prefix()));
        return;
      }
      if (!has_item) continue;
      const uint64_t bytes = item.payload.bytes;
      // The owner is let go before the message counts as written, so that after Flush no tensor is held.
      item = Item();
      absl::MutexLock lock(&mutex_);
      --under_way_;
      ++counters_.messages;
      counters_.payload_bytes += bytes;
      counters_.frame_bytes += kFrameBytes;
    }
  }

  // Watches the peer meanwhile. Nothing comes this way on an edge, so whatever is readable is the end or an error.
  absl::Status WaitForWork() {
    MOONPIPE_ASSIGN_OR_RETURN(const short events,
                              WaitForSocket(socket_.get(), POLLIN | POLLRDHUP, cancellation_, absl::InfiniteFuture()));
    if (events == 0) return absl::OkStatus();
    char byte;
    MOONPIPE_ASSIGN_OR_RETURN(const size_t got, ReadSome(socket_.get(), &byte, 1, cancellation_, absl::InfiniteFuture()));
    if (got == 0) return absl::UnavailableError("peer closed the connection");
    return absl::DataLossError("peer sent bytes against the direction of the edge");
  }

  absl::Status Write(const Item& item) {
    uint32_t crc = Crc32c(item.frame.data(), item.frame.size());
    const char* data = static_cast<const char*>(item.payload.data);
    FrameHeader frame = item.frame;
    for (uint64_t done = 0; done == 0 || done < item.payload.bytes;) {
      const size_t piece = static_cast<size_t>(std::min<uint64_t>(kPieceBytes, item.payload.bytes - done));
      crc = ExtendCrc32c(crc, data + done, piece);
      const bool last = done + piece == item.payload.bytes;
      FrameTrailer trailer = EncodeFrameTrailer(crc);
      iovec parts[3] = {{frame.data(), done == 0 ? frame.size() : 0},
                        {const_cast<char*>(data) + done, piece},
                        {trailer.data(), last ? trailer.size() : 0}};
      MOONPIPE_RETURN_IF_ERROR(WriteFully(socket_.get(), absl::MakeSpan(parts), cancellation_, absl::InfiniteFuture()));
      done += piece;
      if (last) break;
    }
    return absl::OkStatus();
  }

  const SocketEdgeOptions options_;
  UniqueFd socket_;
  Cancellation cancellation_;
  mutable absl::Mutex mutex_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  // Queued or being written.
  size_t under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writer_idle_ ABSL_GUARDED_BY(mutex_) = false;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  EdgeCounters counters_ ABSL_GUARDED_BY(mutex_);
  std::thread writer_;
};

// Memory that is not touched before the socket fills it.
struct Buffer {
  std::unique_ptr<char[]> data;
  uint64_t capacity = 0;
};

class SocketReceiveEdge : public ReceiveEdge {
 public:
  SocketReceiveEdge(UniqueFd socket, SocketEdgeOptions options)
      : options_(std::move(options)), socket_(std::move(socket)) {}

  absl::Status Start() {
    MOONPIPE_RETURN_IF_ERROR(Annotate(cancellation_.reason(), prefix()));
    try {
      reader_ = std::thread([this] { ReadLoop(); });
    } catch (const std::system_error& error) {
      return NoThread(options_.name, error);
    }
    return absl::OkStatus();
  }

  ~SocketReceiveEdge() override {
    Abort(absl::CancelledError("the edge was destroyed"));
    if (reader_.joinable()) reader_.join();
  }

  absl::Status Receive(const MessageHeader& expected, void* destination, absl::Time deadline) override {
    if (const auto frame = EncodeFrameHeader(expected); !frame.ok()) return Annotate(frame.status(), prefix());
    const uint64_t bytes = expected.payload_bytes();
    if (bytes > options_.max_message_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(prefix(), ": expected message of ", bytes, " bytes is over the limit of ",
                                                     options_.max_message_bytes, " bytes: ", expected.ToString(),
                                                     "; raise the edge's max_message_bytes or send smaller microbatches"));
    }
    const absl::Time begin = absl::Now();
    Arrived message;
    {
      absl::MutexLock lock(&mutex_);
      posted_ = {&expected, destination};
      direct_ = Direct::kPosted;
      mutex_.AwaitWithDeadline(absl::Condition(this, &SocketReceiveEdge::ReadyLocked), deadline);
      if (failure_.ok() && direct_ != Direct::kDone && arrived_.empty() && end_.ok()) {
        failure_ = absl::DeadlineExceededError(absl::StrCat(
            prefix(), ": waited ", Waited(begin), " for ", expected.ToString(), "; ",
            partial_bytes_ == 0 ? std::string("nothing of it came")
                                : absl::StrCat("only ", partial_bytes_.load(), " bytes of the next message came")));
      }
      if (!failure_.ok()) {
        // The reader may be writing to the destination: it is told to stop, and waited for.
        StopLocked();
        mutex_.Await(absl::Condition(this, &SocketReceiveEdge::DestinationFreeLocked));
        direct_ = Direct::kNone;
        return failure_;
      }
      if (direct_ == Direct::kDone) {
        direct_ = Direct::kNone;
        return absl::OkStatus();
      }
      direct_ = Direct::kNone;
      if (arrived_.empty()) return end_;
      if (arrived_.front().header != expected) {
        failure_ = absl::FailedPreconditionError(absl::StrCat(prefix(), ": expected ", expected.ToString(), ", got ",
                                                              arrived_.front().header.ToString()));
        StopLocked();
        return failure_;
      }
      message = std::move(arrived_.front());
      arrived_.pop_front();
    }
    if (bytes > 0) std::copy_n(message.buffer.data.get(), bytes, static_cast<char*>(destination));
    absl::MutexLock lock(&mutex_);
    pool_.push_back(std::move(message.buffer));
    return absl::OkStatus();
  }

  bool Ready() const override {
    absl::MutexLock lock(&mutex_);
    return ReadyLocked();
  }

  void Abort(const absl::Status& reason) override {
    absl::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = Annotate(reason.ok() ? absl::AbortedError("aborted") : reason, prefix());
    StopLocked();
  }

  EdgeCounters counters() const override {
    absl::MutexLock lock(&mutex_);
    return counters_;
  }
  const std::string& name() const override { return options_.name; }
  std::string transport() const override { return options_.transport; }

 private:
  struct Arrived {
    MessageHeader header;
    Buffer buffer;
  };
  struct Posted {
    const MessageHeader* expected = nullptr;
    void* destination = nullptr;
  };
  // How far the message is that Receive waits for, where it can be read without a buffer in between.
  enum class Direct { kNone, kPosted, kReading, kDone };

  std::string prefix() const { return absl::StrCat("edge ", options_.name); }
  bool ReadyLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !failure_.ok() || !arrived_.empty() || direct_ == Direct::kDone || !end_.ok();
  }
  bool HasRoomLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !failure_.ok() || arrived_.size() < options_.capacity;
  }
  bool DestinationFreeLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return direct_ != Direct::kReading; }

  void StopLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    cancellation_.Cancel(failure_);
    ::shutdown(socket_.get(), SHUT_RDWR);
    arrived_.clear();
    pool_.clear();
  }

  void ReadLoop() {
    absl::Status status;
    while (status.ok()) status = ReadMessage();
    absl::MutexLock lock(&mutex_);
    end_ = Annotate(status, prefix());
    if (direct_ == Direct::kReading) direct_ = Direct::kNone;
    // What has arrived stays to be received; the peer learns at once that nothing more is read.
    ::shutdown(socket_.get(), SHUT_RDWR);
  }

  absl::Status ReadMessage() {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &SocketReceiveEdge::HasRoomLocked));
      if (!failure_.ok()) return failure_;
    }
    FrameHeader frame;
    uint32_t crc = 0;
    MOONPIPE_RETURN_IF_ERROR(ReadPart(frame.data(), frame.size(), nullptr));
    MOONPIPE_ASSIGN_OR_RETURN(MessageHeader header, ParseFrameHeader(frame, options_.max_message_bytes));
    const uint64_t bytes = header.payload_bytes();
    crc = Crc32c(frame.data(), frame.size());

    Arrived message;
    char* target = nullptr;
    bool direct = false;
    {
      absl::MutexLock lock(&mutex_);
      direct = direct_ == Direct::kPosted && arrived_.empty() && *posted_.expected == header;
      if (direct) {
        direct_ = Direct::kReading;
        target = static_cast<char*>(posted_.destination);
      } else if (!pool_.empty()) {
        message.buffer = std::move(pool_.back());
        pool_.pop_back();
      }
    }
    if (!direct) {
      if (message.buffer.capacity < bytes) {
        message.buffer = Buffer();
        message.buffer.data.reset(new (std::nothrow) char[bytes]);
        if (message.buffer.data == nullptr) {
          return absl::ResourceExhaustedError(absl::StrCat("no memory for a message of ", bytes, " bytes: ", header.ToString()));
        }
        message.buffer.capacity = bytes;
      }
      target = message.buffer.data.get();
    }
    MOONPIPE_RETURN_IF_ERROR(ReadPart(target, bytes, &crc));
    FrameTrailer trailer;
    MOONPIPE_RETURN_IF_ERROR(ReadPart(trailer.data(), trailer.size(), nullptr));
    MOONPIPE_RETURN_IF_ERROR(Annotate(CheckFrameTrailer(trailer, crc), header.ToString()));
    partial_bytes_ = 0;

    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
    ++counters_.messages;
    counters_.payload_bytes += bytes;
    counters_.frame_bytes += kFrameBytes;
    if (direct) {
      direct_ = Direct::kDone;
    } else {
      message.header = std::move(header);
      arrived_.push_back(std::move(message));
    }
    return absl::OkStatus();
  }

  // Reads exactly `bytes`, extending the checksum piece by piece while it is in the cache.
  absl::Status ReadPart(void* data, uint64_t bytes, uint32_t* crc) {
    for (uint64_t done = 0; done < bytes;) {
      char* const at = static_cast<char*>(data) + done;
      const size_t piece = static_cast<size_t>(std::min<uint64_t>(kPieceBytes, bytes - done));
      MOONPIPE_ASSIGN_OR_RETURN(const size_t got, ReadSome(socket_.get(), at, piece, cancellation_, absl::InfiniteFuture()));
      if (got == 0) {
        if (partial_bytes_ == 0) return absl::UnavailableError("peer closed the connection between two messages");
        return absl::UnavailableError(absl::StrCat("peer closed the connection in the middle of a message, after ",
                                                   partial_bytes_.load(), " bytes of it"));
      }
      if (crc != nullptr) *crc = ExtendCrc32c(*crc, at, got);
      partial_bytes_ += got;
      done += got;
    }
    return absl::OkStatus();
  }

  const SocketEdgeOptions options_;
  UniqueFd socket_;
  Cancellation cancellation_;
  // Of the message being read, its frame included; for messages only.
  std::atomic<uint64_t> partial_bytes_ = 0;
  mutable absl::Mutex mutex_;
  std::deque<Arrived> arrived_ ABSL_GUARDED_BY(mutex_);
  std::vector<Buffer> pool_ ABSL_GUARDED_BY(mutex_);
  Posted posted_ ABSL_GUARDED_BY(mutex_);
  Direct direct_ ABSL_GUARDED_BY(mutex_) = Direct::kNone;
  // Why this end ended itself: abort, deadline, wrong message. Comes before what has arrived.
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  // Why the reader ended. Comes after what has arrived.
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
  EdgeCounters counters_ ABSL_GUARDED_BY(mutex_);
  std::thread reader_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SendEdge>> MakeSocketSendEdge(UniqueFd socket, const SocketEdgeOptions& options) {
  MOONPIPE_RETURN_IF_ERROR(CheckOptions(socket, options));
  if (options.transport == "unix") {
    // The kernel grants less where its limit is lower. TCP sizes its buffers by itself, and better.
    const int bytes = kSocketBufferBytes;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  }
  auto edge = std::make_unique<SocketSendEdge>(std::move(socket), options);
  MOONPIPE_RETURN_IF_ERROR(edge->Start());
  return edge;
}

absl::StatusOr<std::unique_ptr<ReceiveEdge>> MakeSocketReceiveEdge(UniqueFd socket, const SocketEdgeOptions& options) {
  MOONPIPE_RETURN_IF_ERROR(CheckOptions(socket, options));
  auto edge = std::make_unique<SocketReceiveEdge>(std::move(socket), options);
  MOONPIPE_RETURN_IF_ERROR(edge->Start());
  return edge;
}

}  // namespace moonpipe
