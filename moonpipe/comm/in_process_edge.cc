#include "moonpipe/comm/in_process_edge.h"

#include <deque>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/comm/crc32c.h"
#include "moonpipe/comm/frame.h"

namespace moonpipe {
namespace {

struct Message {
  FrameHeader frame;
  std::vector<uint8_t> payload;
  uint32_t crc = 0;
};

// What both ends share. Either end's failure ends the other with UNAVAILABLE, as a socket's would.
class Channel {
 public:
  Channel(std::string name, InProcessEdgeOptions options)
      : name_(std::move(name)), options_(std::move(options)), held_(options_.faults.hold) {}

  absl::Status Send(const MessageHeader& header, const Payload& payload, absl::Time deadline) {
    MOONPIPE_RETURN_IF_ERROR(CheckLimit(header));
    if (payload.bytes != header.payload_bytes()) {
      return absl::InvalidArgumentError(absl::StrCat(prefix(), ": payload has ", payload.bytes, " bytes but ",
                                                     header.ToString(), " makes ", header.payload_bytes()));
    }
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithDeadline(absl::Condition(this, &Channel::MaySendLocked), deadline);
    if (!sender_end_.ok()) return sender_end_;
    if (messages_.size() >= options_.capacity) {
      return EndLocked(sender_end_, receiver_end_,
                       absl::DeadlineExceededError(absl::StrCat(prefix(), ": could not send ", header.ToString(), " in time; ",
                                                                messages_.size(), " of ", options_.capacity,
                                                                " messages are under way")));
    }
    const uint64_t index = sent_.messages;
    if (options_.faults.drop_after_messages && index >= *options_.faults.drop_after_messages) {
      const absl::Status gone = absl::UnavailableError(absl::StrCat(prefix(), ": peer closed the connection"));
      receiver_end_ = gone;
      return EndLocked(sender_end_, receiver_end_, gone);
    }
    MessageHeader passed = header;
    if (options_.faults.rewrite_header) options_.faults.rewrite_header(index, passed);
    auto frame = EncodeFrameHeader(passed);
    if (!frame.ok()) return Annotate(frame.status(), prefix());
    const auto* bytes = static_cast<const uint8_t*>(payload.data);
    Message message{*frame, std::vector<uint8_t>(bytes, bytes + payload.bytes), 0};
    message.crc = ExtendCrc32c(Crc32c(frame->data(), frame->size()), message.payload.data(), message.payload.size());
    if (const auto& corrupt = options_.faults.corrupt; corrupt && corrupt->message == index) {
      message.payload.at(corrupt->byte) ^= 0x20;
    }
    messages_.push_back(std::move(message));
    Count(sent_, payload.bytes);
    return absl::OkStatus();
  }

  absl::Status Receive(const MessageHeader& expected, void* destination, absl::Time deadline) {
    MOONPIPE_RETURN_IF_ERROR(CheckLimit(expected));
    absl::MutexLock lock(&mutex_);
    const absl::Time begin = absl::Now();
    mutex_.AwaitWithDeadline(absl::Condition(this, &Channel::ReadyLocked), deadline);
    if (receiver_aborted_) return receiver_end_;
    if (held_ || messages_.empty()) {
      if (!receiver_end_.ok()) return receiver_end_;
      return EndLocked(receiver_end_, sender_end_,
                       absl::DeadlineExceededError(
                           absl::StrCat(prefix(), ": waited ", absl::FormatDuration(absl::Trunc(absl::Now() - begin, absl::Milliseconds(1))),
                                        " for ", expected.ToString(), "; nothing of it came")));
    }
    const Message message = std::move(messages_.front());
    messages_.pop_front();
    auto header = ParseFrameHeader(message.frame, options_.max_message_bytes);
    if (!header.ok()) return EndLocked(receiver_end_, sender_end_, Annotate(header.status(), prefix()));
    const uint32_t crc =
        ExtendCrc32c(Crc32c(message.frame.data(), message.frame.size()), message.payload.data(), message.payload.size());
    if (const absl::Status intact = CheckFrameTrailer(EncodeFrameTrailer(message.crc), crc); !intact.ok()) {
      return EndLocked(receiver_end_, sender_end_, Annotate(intact, absl::StrCat(prefix(), ": ", header->ToString())));
    }
    if (*header != expected) {
      return EndLocked(receiver_end_, sender_end_,
                       absl::FailedPreconditionError(absl::StrCat(prefix(), ": expected ", expected.ToString(), ", got ",
                                                                  header->ToString())));
    }
    std::copy(message.payload.begin(), message.payload.end(), static_cast<uint8_t*>(destination));
    Count(received_, message.payload.size());
    return absl::OkStatus();
  }

  bool Ready() const {
    absl::MutexLock lock(&mutex_);
    return ReadyLocked();
  }

  void AbortSender(const absl::Status& reason) {
    absl::MutexLock lock(&mutex_);
    sender_aborted_ = true;
    (void)EndLocked(sender_end_, receiver_end_, Annotate(reason, prefix()));
  }
  void AbortReceiver(const absl::Status& reason) {
    absl::MutexLock lock(&mutex_);
    receiver_aborted_ = true;
    (void)EndLocked(receiver_end_, sender_end_, Annotate(reason, prefix()));
  }
  absl::Status Flush() const {
    absl::MutexLock lock(&mutex_);
    return sender_aborted_ ? sender_end_ : absl::OkStatus();
  }
  void Release() {
    absl::MutexLock lock(&mutex_);
    held_ = false;
  }

  EdgeCounters sent() const {
    absl::MutexLock lock(&mutex_);
    return sent_;
  }
  EdgeCounters received() const {
    absl::MutexLock lock(&mutex_);
    return received_;
  }
  const std::string& name() const { return name_; }

 private:
  std::string prefix() const { return absl::StrCat("edge ", name_); }
  bool MaySendLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !sender_end_.ok() || messages_.size() < options_.capacity;
  }
  bool ReadyLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return receiver_aborted_ || !receiver_end_.ok() || (!held_ && !messages_.empty());
  }

  absl::Status CheckLimit(const MessageHeader& header) const {
    if (const auto frame = EncodeFrameHeader(header); !frame.ok()) return Annotate(frame.status(), prefix());
    if (header.payload_bytes() <= options_.max_message_bytes) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(prefix(), ": message of ", header.payload_bytes(),
                                                   " bytes is over the limit of ", options_.max_message_bytes,
                                                   " bytes: ", header.ToString()));
  }

  // Ends one end for `reason` and the other because its peer has gone; returns the first reason of the one.
  absl::Status EndLocked(absl::Status& self, absl::Status& other, const absl::Status& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (self.ok()) self = reason;
    if (other.ok()) other = absl::UnavailableError(absl::StrCat(prefix(), ": peer closed the connection"));
    return self;
  }

  static void Count(EdgeCounters& counters, uint64_t payload_bytes) {
    ++counters.messages;
    counters.payload_bytes += payload_bytes;
    counters.frame_bytes += kFrameBytes;
  }

  const std::string name_;
  const InProcessEdgeOptions options_;
  mutable absl::Mutex mutex_;
  std::deque<Message> messages_ ABSL_GUARDED_BY(mutex_);
  bool held_ ABSL_GUARDED_BY(mutex_);
  bool sender_aborted_ ABSL_GUARDED_BY(mutex_) = false;
  bool receiver_aborted_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status sender_end_ ABSL_GUARDED_BY(mutex_);
  // Comes after what has arrived, unless the receiver itself aborted.
  absl::Status receiver_end_ ABSL_GUARDED_BY(mutex_);
  EdgeCounters sent_ ABSL_GUARDED_BY(mutex_);
  EdgeCounters received_ ABSL_GUARDED_BY(mutex_);
};

absl::Status OrAborted(const absl::Status& reason) { return reason.ok() ? absl::AbortedError("aborted") : reason; }

class LocalSendEdge : public SendEdge {
 public:
  explicit LocalSendEdge(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}
  ~LocalSendEdge() override { Abort(absl::CancelledError("the edge was destroyed")); }
  absl::Status Send(const MessageHeader& header, Payload payload, absl::Time deadline) override {
    return channel_->Send(header, payload, deadline);
  }
  absl::Status Flush(absl::Time) override { return channel_->Flush(); }
  void Abort(const absl::Status& reason) override { channel_->AbortSender(OrAborted(reason)); }
  EdgeCounters counters() const override { return channel_->sent(); }
  const std::string& name() const override { return channel_->name(); }
  std::string transport() const override { return "local"; }

 private:
  const std::shared_ptr<Channel> channel_;
};

class LocalReceiveEdge : public ReceiveEdge {
 public:
  explicit LocalReceiveEdge(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}
  ~LocalReceiveEdge() override { Abort(absl::CancelledError("the edge was destroyed")); }
  absl::Status Receive(const MessageHeader& expected, void* destination, absl::Time deadline) override {
    return channel_->Receive(expected, destination, deadline);
  }
  bool Ready() const override { return channel_->Ready(); }
  void Abort(const absl::Status& reason) override { channel_->AbortReceiver(OrAborted(reason)); }
  EdgeCounters counters() const override { return channel_->received(); }
  const std::string& name() const override { return channel_->name(); }
  std::string transport() const override { return "local"; }

 private:
  const std::shared_ptr<Channel> channel_;
};

}  // namespace

InProcessEdge MakeInProcessEdge(const std::string& name, const InProcessEdgeOptions& options) {
  auto channel = std::make_shared<Channel>(name, options);
  return {std::make_unique<LocalSendEdge>(channel), std::make_unique<LocalReceiveEdge>(channel),
          [channel] { channel->Release(); }};
}

}  // namespace moonpipe
