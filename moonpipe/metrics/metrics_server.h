// The page /metrics over HTTP.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "moonpipe/metrics/registry.h"

namespace prometheus {
class Exposer;
}

namespace moonpipe {

// In a process that uses the CUDA module, start it before that is loaded: the HTTP library's thread stacks are smaller
// than the thread-local storage of the CUDA libraries.
class MetricsServer {
 public:
  // Serves `registry` on HOST:PORT; port 0 lets the system choose. INVALID_ARGUMENT for a bad address or one beyond
  // loopback without `insecure`; UNAVAILABLE where the port is in use, with the port and --metrics-listen.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& listen, bool insecure,
                                                              const MetricsRegistry& registry);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  // HOST:PORT with the port that was bound.
  const std::string& address() const { return address_; }
  int port() const { return port_; }

 private:
  MetricsServer();

  // The exposer holds only a weak pointer.
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<prometheus::Exposer> exposer_;
  std::string address_;
  int port_ = 0;
};

}  // namespace moonpipe
