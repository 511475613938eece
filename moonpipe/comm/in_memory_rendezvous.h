// A Rendezvous within one process, for tests: a map under a mutex.
#pragma once

#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "moonpipe/comm/rendezvous.h"

namespace moonpipe {

class InMemoryRendezvous : public Rendezvous {
 public:
  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override;
  // As when the plan ends: every Get and Set, waiting or later, gives this reason.
  void Close(const absl::Status& reason);

 private:
  absl::Mutex mutex_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moonpipe
