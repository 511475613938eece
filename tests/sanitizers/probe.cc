// Shows that the sanitizers of this build report what they must and nothing else: `sanitizer_probe clean | race | overflow | leak`.
// Ends with 0 unless a report ends it; `clean` must, the others must not.
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace {

// Two threads count under a mutex, one awaits the sum by a condition, a notification hands over a value: no race.
int Guarded() {
  absl::Mutex mutex;
  int count = 0;
  int handed_over = 0;
  absl::Notification ready;
  const auto add = [&] {
    for (int i = 0; i < 1000; ++i) {
      absl::MutexLock lock(&mutex);
      ++count;
    }
  };
  std::thread other([&] {
    add();
    handed_over = 1;
    ready.Notify();
  });
  add();
  {
    absl::MutexLock lock(&mutex);
    const auto done = [&] { return count == 2000; };
    mutex.Await(absl::Condition(&done));
    count = 0;
  }
  ready.WaitForNotification();
  handed_over += 1;
  other.join();
  return handed_over == 2 ? 0 : 1;
}

int Race() {
  int count = 0;
  const auto add = [&count] {
    for (int i = 0; i < 1000; ++i) *const_cast<volatile int*>(&count) = count + 1;
  };
  std::thread other(add);
  add();
  other.join();
  return 0;
}

int Overflow() {
  const auto bytes = std::make_unique<char[]>(8);
  volatile size_t beyond = 8;
  bytes[beyond] = 1;
  return 0;
}

int Leak() {
  // Its complement is no pointer to the memory.
  static volatile uintptr_t hidden;
  hidden = ~reinterpret_cast<uintptr_t>(new std::array<char, 100>);
  return hidden == 0 ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "";
  if (std::strcmp(what, "clean") == 0) return Guarded();
  if (std::strcmp(what, "race") == 0) return Race();
  if (std::strcmp(what, "overflow") == 0) return Overflow();
  if (std::strcmp(what, "leak") == 0) return Leak();
  return 0;
}
