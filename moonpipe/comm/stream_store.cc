#include "moonpipe/comm/stream_store.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace moonpipe {
namespace {

constexpr absl::Duration kCheckPatience = absl::Milliseconds(100);

absl::Time After(std::chrono::milliseconds timeout) {
  return timeout == c10d::Store::kNoTimeout ? absl::InfiniteFuture() : absl::Now() + absl::FromChrono(timeout);
}

}  // namespace

StreamStore::StreamStore(Rendezvous* rendezvous, std::string prefix, std::chrono::milliseconds timeout)
    : c10d::Store(timeout), rendezvous_(rendezvous), prefix_(std::move(prefix)) {}

c10::intrusive_ptr<c10d::Store> StreamStore::clone() {
  return c10::make_intrusive<StreamStore>(rendezvous_, prefix_, timeout_);
}

void StreamStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  const absl::Status status = rendezvous_->Set(absl::StrCat(prefix_, key), std::string(value.begin(), value.end()));
  if (!status.ok()) C10_THROW_ERROR(DistStoreError, absl::StrCat("set ", prefix_, key, ": ", status.ToString()));
}

std::string StreamStore::Get(const std::string& key, absl::Time deadline) {
  absl::StatusOr<std::string> value = rendezvous_->Get(absl::StrCat(prefix_, key), deadline);
  if (!value.ok()) C10_THROW_ERROR(DistStoreError, absl::StrCat("get ", prefix_, key, ": ", value.status().ToString()));
  return *std::move(value);
}

std::vector<uint8_t> StreamStore::get(const std::string& key) {
  const std::string value = Get(key, After(timeout_));
  return {value.begin(), value.end()};
}

bool StreamStore::check(const std::vector<std::string>& keys) {
  const absl::Time deadline = absl::Now() + kCheckPatience;
  for (const std::string& key : keys) {
    const absl::Status status = rendezvous_->Get(absl::StrCat(prefix_, key), deadline).status();
    if (absl::IsDeadlineExceeded(status)) return false;
    if (!status.ok()) C10_THROW_ERROR(DistStoreError, absl::StrCat("check ", prefix_, key, ": ", status.ToString()));
  }
  return true;
}

void StreamStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void StreamStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const absl::Time deadline = After(timeout);
  for (const std::string& key : keys) Get(key, deadline);
}

int64_t StreamStore::add(const std::string& key, int64_t /*value*/) {
  C10_THROW_ERROR(NotImplementedError, absl::StrCat("a rendezvous has no counters: add ", prefix_, key));
}

bool StreamStore::deleteKey(const std::string& key) {
  C10_THROW_ERROR(NotImplementedError, absl::StrCat("a rendezvous forgets nothing: deleteKey ", prefix_, key));
}

int64_t StreamStore::getNumKeys() { C10_THROW_ERROR(NotImplementedError, "a rendezvous does not count its keys"); }

}  // namespace moonpipe
