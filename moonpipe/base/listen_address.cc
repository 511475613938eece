#include "moonpipe/base/listen_address.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace moonpipe {

absl::StatusOr<HostPort> ParseHostPort(absl::string_view address) {
  const auto invalid = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", address, "\" is not an address: ", why, "; write HOST:PORT, as in 127.0.0.1:7070"));
  };
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) return invalid("it has no port");
  absl::string_view host = address.substr(0, colon);
  const absl::string_view digits = address.substr(colon + 1);
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) {
    host = host.substr(1, host.size() - 2);
  } else if (absl::StrContains(host, ":")) {
    return invalid("an IPv6 host stands in brackets");
  }
  if (host.empty()) return invalid("it has no host");
  HostPort parsed{std::string(host), 0};
  const bool is_number =
      !digits.empty() && std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!is_number || !absl::SimpleAtoi(digits, &parsed.port) || parsed.port > 65535) {
    return invalid("the port is a number from 0 to 65535");
  }
  return parsed;
}

std::string FormatHostPort(absl::string_view host, int port) {
  return absl::StrContains(host, ":") ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

bool IsLoopback(absl::string_view address) {
  if (absl::StartsWith(address, "unix:")) return true;
  const auto parsed = ParseHostPort(address);
  if (!parsed.ok()) return false;
  if (absl::EqualsIgnoreCase(parsed->host, "localhost") || parsed->host == "::1") return true;
  // Only a literal counts: a name such as 127.example.org is resolved elsewhere.
  const auto is_literal = [](char c) { return absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '.'; };
  return absl::StartsWith(parsed->host, "127.") && std::all_of(parsed->host.begin(), parsed->host.end(), is_literal);
}

absl::Status CheckPlainTextAllowed(absl::string_view address, bool insecure, absl::string_view flag) {
  if (insecure || IsLoopback(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      flag, " ", address, " would serve plain text beyond this machine; give a loopback address or say --insecure"));
}

}  // namespace moonpipe
