#include "moonpipe/comm/in_memory_rendezvous.h"

#include "absl/strings/str_cat.h"

namespace moonpipe {

absl::Status InMemoryRendezvous::Set(const std::string& key, const std::string& value) {
  absl::MutexLock lock(&mutex_);
  if (!closed_.ok()) return closed_;
  values_[key] = value;
  return absl::OkStatus();
}

absl::StatusOr<std::string> InMemoryRendezvous::Get(const std::string& key, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto answered = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !closed_.ok() || values_.count(key) != 0; };
  mutex_.AwaitWithDeadline(absl::Condition(&answered), deadline);
  if (!closed_.ok()) return closed_;
  const auto found = values_.find(key);
  if (found == values_.end()) return absl::DeadlineExceededError(absl::StrCat("no worker has set the key \"", key, "\""));
  return found->second;
}

void InMemoryRendezvous::Close(const absl::Status& reason) {
  absl::MutexLock lock(&mutex_);
  if (closed_.ok()) closed_ = reason;
}

}  // namespace moonpipe
