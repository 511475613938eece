// The c10d::Store through which c10d's process groups find each other, over a Rendezvous. It holds what ProcessGroupGloo and
// ProcessGroupNCCL need to be built: set, get, wait and check. A Rendezvous has no counters and forgets nothing, so `add`,
// `compareSet` and `deleteKey` throw NotImplementedError.
//
// As c10d demands, failures are exceptions: c10::DistStoreError with the status in its text.
#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "moonpipe/comm/rendezvous.h"

namespace moonpipe {

class StreamStore : public c10d::Store {
 public:
  // Every key is put under `prefix`, which must differ between the groups of all plans. `rendezvous` must outlive the store and
  // its clones. `timeout` is the longest wait of get; at most what wait is given.
  StreamStore(Rendezvous* rendezvous, std::string prefix, std::chrono::milliseconds timeout);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  // Blocks until the key is set, at most getTimeout().
  std::vector<uint8_t> get(const std::string& key) override;
  // True if all are set. An answer that takes more than 100 ms counts as no.
  bool check(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  int64_t getNumKeys() override;

 private:
  std::string Get(const std::string& key, absl::Time deadline);

  Rendezvous* const rendezvous_;
  const std::string prefix_;
};

}  // namespace moonpipe
