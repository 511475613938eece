// Linked into every program of the tsan build. Debian's Abseil is not instrumented, so the thread sanitizer would see neither its locks
// nor its conditions and report every member that they guard. These definitions stand before the library's (its own calls go through
// the symbol table too): they tell the sanitizer who hands over to whom and call the library's for the work.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}

namespace {

// Member functions take their object as the first argument.
template <typename Function>
Function* Library(const char* symbol) {
  void* found = dlsym(RTLD_NEXT, symbol);
  if (found == nullptr) {
    std::fprintf(stderr, "absl_mutex.cc: this Abseil has no %s; it was written for Debian's 20220623\n", symbol);
    std::abort();
  }
  return reinterpret_cast<Function*>(found);
}

void* Untyped(const void* object) { return const_cast<void*>(object); }

}  // namespace

#define LIBRARY(signature, name) static auto* const library = Library<signature>("_ZN" name)
#define LIBRARY_CONST(signature, name) static auto* const library = Library<signature>("_ZNK" name)

namespace absl {

void Mutex::Lock() {
  LIBRARY(void(Mutex*), "4absl7debian35Mutex4LockEv");
  library(this);
  __tsan_acquire(this);
}

void Mutex::Unlock() {
  LIBRARY(void(Mutex*), "4absl7debian35Mutex6UnlockEv");
  __tsan_release(this);
  library(this);
}

bool Mutex::TryLock() {
  LIBRARY(bool(Mutex*), "4absl7debian35Mutex7TryLockEv");
  const bool locked = library(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void Mutex::ReaderLock() {
  LIBRARY(void(Mutex*), "4absl7debian35Mutex10ReaderLockEv");
  library(this);
  __tsan_acquire(this);
}

void Mutex::ReaderUnlock() {
  LIBRARY(void(Mutex*), "4absl7debian35Mutex12ReaderUnlockEv");
  __tsan_release(this);
  library(this);
}

bool Mutex::ReaderTryLock() {
  LIBRARY(bool(Mutex*), "4absl7debian35Mutex13ReaderTryLockEv");
  const bool locked = library(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void Mutex::Await(const Condition& condition) {
  LIBRARY(void(Mutex*, const Condition&), "4absl7debian35Mutex5AwaitERKNS0_9ConditionE");
  __tsan_release(this);
  library(this, condition);
  __tsan_acquire(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  LIBRARY(bool(Mutex*, const Condition&, Duration), "4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  __tsan_release(this);
  const bool holds = library(this, condition, timeout);
  __tsan_acquire(this);
  return holds;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  LIBRARY(bool(Mutex*, const Condition&, Time), "4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  __tsan_release(this);
  const bool holds = library(this, condition, deadline);
  __tsan_acquire(this);
  return holds;
}

void Mutex::LockWhen(const Condition& condition) {
  LIBRARY(void(Mutex*, const Condition&), "4absl7debian35Mutex8LockWhenERKNS0_9ConditionE");
  library(this, condition);
  __tsan_acquire(this);
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  LIBRARY(bool(Mutex*, const Condition&, Duration), "4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  const bool holds = library(this, condition, timeout);
  __tsan_acquire(this);
  return holds;
}

bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  LIBRARY(bool(Mutex*, const Condition&, Time), "4absl7debian35Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  const bool holds = library(this, condition, deadline);
  __tsan_acquire(this);
  return holds;
}

void CondVar::Wait(Mutex* mutex) {
  LIBRARY(void(CondVar*, Mutex*), "4absl7debian37CondVar4WaitEPNS0_5MutexE");
  __tsan_release(mutex);
  library(this, mutex);
  __tsan_acquire(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  LIBRARY(bool(CondVar*, Mutex*, Duration), "4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  __tsan_release(mutex);
  const bool timed_out = library(this, mutex, timeout);
  __tsan_acquire(mutex);
  return timed_out;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  LIBRARY(bool(CondVar*, Mutex*, Time), "4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  __tsan_release(mutex);
  const bool timed_out = library(this, mutex, deadline);
  __tsan_acquire(mutex);
  return timed_out;
}

// The library evaluates conditions under the lock, but also on the thread that is about to unlock: after Unlock above has told of it.
bool Condition::Eval() const {
  LIBRARY_CONST(bool(const Condition*), "4absl7debian39Condition4EvalEv");
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  const bool holds = library(this);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  return holds;
}

// A Notification is a mutex and then a flag, which HasBeenNotified loads inline.
void Notification::Notify() {
  LIBRARY(void(Notification*), "4absl7debian312Notification6NotifyEv");
  __tsan_release(this);
  __tsan_release(reinterpret_cast<char*>(this) + sizeof(Mutex));
  library(this);
}

void Notification::WaitForNotification() const {
  LIBRARY_CONST(void(const Notification*), "4absl7debian312Notification19WaitForNotificationEv");
  library(this);
  __tsan_acquire(Untyped(this));
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  LIBRARY_CONST(bool(const Notification*, Duration), "4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE");
  const bool notified = library(this, timeout);
  if (notified) __tsan_acquire(Untyped(this));
  return notified;
}

bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  LIBRARY_CONST(bool(const Notification*, Time), "4absl7debian312Notification31WaitForNotificationWithDeadlineENS0_4TimeE");
  const bool notified = library(this, deadline);
  if (notified) __tsan_acquire(Untyped(this));
  return notified;
}

bool BlockingCounter::DecrementCount() {
  LIBRARY(bool(BlockingCounter*), "4absl7debian315BlockingCounter14DecrementCountEv");
  __tsan_release(this);
  return library(this);
}

void BlockingCounter::Wait() {
  LIBRARY(void(BlockingCounter*), "4absl7debian315BlockingCounter4WaitEv");
  library(this);
  __tsan_acquire(this);
}

}  // namespace absl
