#include "moonpipe/metrics/metrics_server.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "moonpipe/base/listen_address.h"
#include "moonpipe/base/status_macros.h"
#include "prometheus/exposer.h"
#include "prometheus/registry.h"

namespace moonpipe {
namespace {

// Connects and hangs up.
void KnockAt(const std::string& address) {
  const auto parsed = ParseHostPort(address);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const std::string host = parsed->host == "localhost" ? "127.0.0.1" : parsed->host;
  if (::getaddrinfo(host.c_str(), absl::StrCat(parsed->port).c_str(), &hints, &found) != 0) return;
  const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd >= 0) {
    // A refused connection means that it has stopped listening, which is as good.
    (void)::connect(fd, found->ai_addr, found->ai_addrlen);
    ::close(fd);
  }
  ::freeaddrinfo(found);
}

}  // namespace

MetricsServer::MetricsServer() = default;

MetricsServer::~MetricsServer() {
  if (exposer_ == nullptr) return;
  // The HTTP library sees that it is to stop only when its poll of 2 s returns, or when somebody connects.
  std::atomic<bool> stopped = false;
  std::thread stopper([&] {
    exposer_.reset();
    stopped = true;
  });
  while (!stopped) {
    KnockAt(address_);
    absl::SleepFor(absl::Milliseconds(5));
  }
  stopper.join();
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& listen, bool insecure,
                                                                    const MetricsRegistry& registry) {
  MOONPIPE_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(listen));
  MOONPIPE_RETURN_IF_ERROR(CheckPlainTextAllowed(listen, insecure, "--metrics-listen"));
  std::unique_ptr<MetricsServer> server(new MetricsServer);
  server->registry_ = registry.registry();
  // The HTTP library takes addresses, not names.
  const std::string host = address.host == "localhost" ? "127.0.0.1" : address.host;
  try {
    server->exposer_ = std::make_unique<prometheus::Exposer>(FormatHostPort(host, address.port));
    server->exposer_->RegisterCollectable(server->registry_);
    const std::vector<int> ports = server->exposer_->GetListeningPorts();
    if (!ports.empty()) server->port_ = ports[0];
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on port ", address.port, " of ", address.host, ": ", error.what(),
                     "; is the port in use? Choose another with --metrics-listen, port 0 for any free one"));
  }
  if (server->port_ == 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on ", listen, ": no port was bound; choose another with --metrics-listen"));
  }
  server->address_ = FormatHostPort(address.host, server->port_);
  return server;
}

}  // namespace moonpipe
