// A queue of fixed capacity between threads: the hand-over of the whole system. Producers wait when it is full, consumers when
// it is empty, each with a deadline. Closing wakes everyone: what is queued can still be taken, nothing more can be added.
#pragma once

#include <deque>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace moonpipe {

template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  // Blocks while full. DEADLINE_EXCEEDED at the deadline; the reason of Close once closed.
  absl::Status Push(T value, absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    const bool in_time = mutex_.AwaitWithDeadline(absl::Condition(this, &BoundedQueue::CanPushLocked), deadline);
    if (closed_) return reason_;
    if (!in_time) return absl::DeadlineExceededError("queue is full");
    items_.push_back(std::move(value));
    return absl::OkStatus();
  }

  // Blocks while empty. DEADLINE_EXCEEDED at the deadline; the reason of Close once closed and drained.
  absl::StatusOr<T> Pop(absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    const bool in_time = mutex_.AwaitWithDeadline(absl::Condition(this, &BoundedQueue::CanPopLocked), deadline);
    if (!items_.empty()) {
      T value = std::move(items_.front());
      items_.pop_front();
      return value;
    }
    if (closed_) return reason_;
    (void)in_time;
    return absl::DeadlineExceededError("queue is empty");
  }

  // The first reason stays. It must not be OK.
  void Close(absl::Status reason) {
    absl::MutexLock lock(&mutex_);
    if (closed_) return;
    closed_ = true;
    reason_ = std::move(reason);
  }

  size_t size() const {
    absl::MutexLock lock(&mutex_);
    return items_.size();
  }

 private:
  bool CanPushLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return closed_ || items_.size() < capacity_; }
  bool CanPopLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return closed_ || !items_.empty(); }

  mutable absl::Mutex mutex_;
  const size_t capacity_;
  std::deque<T> items_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status reason_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moonpipe
