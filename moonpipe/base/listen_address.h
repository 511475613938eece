// Addresses of the form HOST:PORT, [IPV6]:PORT or unix:PATH that services listen on and dial.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moonpipe {

struct HostPort {
  std::string host;  // Without brackets.
  int port = 0;      // 0 lets the system choose.
};

// INVALID_ARGUMENT for anything but a host and a port from 0 to 65535.
absl::StatusOr<HostPort> ParseHostPort(absl::string_view address);

// HOST:PORT, with brackets around an IPv6 host.
std::string FormatHostPort(absl::string_view host, int port);

// True for localhost, 127.0.0.0/8, ::1 and Unix sockets: nobody outside this machine can connect.
bool IsLoopback(absl::string_view address);

// Plain text beyond loopback must be asked for: INVALID_ARGUMENT unless `address` is loopback or `insecure` is set.
// `flag` is the flag that gave the address.
absl::Status CheckPlainTextAllowed(absl::string_view address, bool insecure, absl::string_view flag);

}  // namespace moonpipe
