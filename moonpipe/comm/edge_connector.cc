#include "moonpipe/comm/edge_connector.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <list>
#include <optional>
#include <random>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/comm/edge_handshake.h"
#include "moonpipe/comm/socket_edge.h"

namespace moonpipe {
namespace {

// Connections that are shaking hands at once. Beyond it no more are accepted until one is done, or the oldest has been silent for
// so long that it makes room: idle strangers cannot shut the peer out, and a crowd of them does not push it aside.
constexpr size_t kMaxPending = 32;
constexpr absl::Duration kPendingGrace = absl::Seconds(1);

struct Connected {
  UniqueFd socket;
  std::string transport;
};

// Where a listener can be reached. Travels as four lines: boot id, Unix socket ("@" begins an abstract name), host, port.
struct EdgeAddress {
  std::string boot_id;
  std::string unix_path;
  std::string host;
  uint32_t port = 0;

  std::string Encode() const { return absl::StrCat(boot_id, "\n", unix_path, "\n", host, "\n", port); }
  static absl::StatusOr<EdgeAddress> Decode(const std::string& text) {
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    EdgeAddress address;
    if (lines.size() != 4 || !absl::SimpleAtoi(lines[3], &address.port)) {
      return absl::InvalidArgumentError(absl::StrCat("\"", absl::CEscape(text), "\" is no address of an edge"));
    }
    address.boot_id = lines[0];
    address.unix_path = lines[1];
    address.host = lines[2];
    return address;
  }
};

absl::Status SystemError(absl::string_view what) { return absl::UnavailableError(absl::StrCat(what, ": ", ErrnoText(errno))); }

struct UnixName {
  sockaddr_un address{};
  socklen_t length = 0;
};

// Empty if the name is too long.
std::optional<UnixName> MakeUnixName(const std::string& path) {
  UnixName name;
  name.address.sun_family = AF_UNIX;
  if (path.size() >= sizeof name.address.sun_path) return std::nullopt;
  std::memcpy(name.address.sun_path, path.data(), path.size());
  const bool abstract = path[0] == '@';
  if (abstract) name.address.sun_path[0] = '\0';
  // An abstract name is as long as told; a path ends with a zero byte.
  name.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + (abstract ? 0 : 1));
  return name;
}

// A listening Unix socket whose file goes with it.
class UnixListener {
 public:
  ~UnixListener() {
    if (!path_.empty() && path_[0] != '@') ::unlink(path_.c_str());
  }

  absl::Status Listen(const std::string& folder) {
    std::random_device random;
    const std::string name = absl::StrCat("edge-", absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8));
    std::string path = folder.empty() ? absl::StrCat("@moonpipe-", name) : absl::StrCat(folder, "/", name);
    std::optional<UnixName> address = MakeUnixName(path);
    if (!address) {
      path = absl::StrCat("@moonpipe-", name);
      address = MakeUnixName(path);
    }
    socket_ = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket_.valid()) return SystemError("cannot open a Unix socket");
    if (::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address->address), address->length) != 0) {
      return SystemError(absl::StrCat("cannot bind ", path));
    }
    path_ = path;
    if (::listen(socket_.get(), SOMAXCONN) != 0) return SystemError(absl::StrCat("cannot listen on ", path));
    return absl::OkStatus();
  }

  int fd() const { return socket_.get(); }
  const std::string& path() const { return path_; }

 private:
  UniqueFd socket_;
  std::string path_;
};

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

absl::StatusOr<Addresses> Resolve(const std::string& host, uint32_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) return absl::UnavailableError(absl::StrCat("cannot resolve \"", host, "\": ", ::gai_strerror(error)));
  return Addresses(list);
}

absl::StatusOr<UniqueFd> ListenTcp(const std::string& host, uint32_t& port) {
  MOONPIPE_ASSIGN_OR_RETURN(const Addresses addresses, Resolve(host, 0, AI_PASSIVE));
  UniqueFd socket(::socket(addresses->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return SystemError("cannot open a TCP socket");
  if (::bind(socket.get(), addresses->ai_addr, addresses->ai_addrlen) != 0) {
    return SystemError(absl::StrCat("cannot bind ", host));
  }
  if (::listen(socket.get(), SOMAXCONN) != 0) return SystemError(absl::StrCat("cannot listen on ", host));
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    return SystemError("cannot read the port of a TCP socket");
  }
  port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return socket;
}

void SetNoDelay(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// A connection whose peer has not yet shown who it is.
struct Pending {
  UniqueFd socket;
  std::string transport;
  std::string challenge;
  std::string hello;
  absl::Time since;
};

class Listener {
 public:
  Listener(const EdgeEndpoint& endpoint, const EdgeIdentity& identity, Cancellation& cancellation, absl::Time deadline)
      : endpoint_(endpoint), identity_(identity), cancellation_(cancellation), deadline_(deadline) {}

  absl::StatusOr<Connected> Run(Rendezvous* rendezvous) {
    EdgeAddress address;
    if (!endpoint_.prefer_tcp && !endpoint_.boot_id.empty()) {
      MOONPIPE_RETURN_IF_ERROR(unix_.Listen(endpoint_.socket_folder));
      address.boot_id = endpoint_.boot_id;
      address.unix_path = unix_.path();
    }
    MOONPIPE_ASSIGN_OR_RETURN(tcp_, ListenTcp(endpoint_.listen_host, address.port));
    address.host = endpoint_.advertise_host;
    MOONPIPE_RETURN_IF_ERROR(rendezvous->Set(EdgeAddressKey(endpoint_), address.Encode()));
    while (true) {
      MOONPIPE_RETURN_IF_ERROR(Poll());
      for (auto pending = pending_.begin(); pending != pending_.end();) {
        const absl::StatusOr<bool> done = Advance(*pending);
        if (done.ok() && *done) return Connected{std::move(pending->socket), pending->transport};
        if (!done.ok()) {
          if (done.status().code() != absl::StatusCode::kUnavailable) last_refusal_ = done.status();
          pending = pending_.erase(pending);
        } else {
          ++pending;
        }
      }
      if (Full() && absl::Now() >= pending_.front().since + kPendingGrace) pending_.pop_front();
      Accept(unix_.fd(), "unix");
      Accept(tcp_.get(), "tcp");
    }
  }

 private:
  bool Full() const { return pending_.size() >= kMaxPending; }

  // Returns when something may have happened.
  absl::Status Poll() {
    std::vector<pollfd> waits = {{cancellation_.fd(), POLLIN, 0}};
    absl::Time until = deadline_;
    if (Full()) {
      until = std::min(until, pending_.front().since + kPendingGrace);
    } else {
      waits.push_back({unix_.fd(), POLLIN, 0});
      waits.push_back({tcp_.get(), POLLIN, 0});
    }
    for (const Pending& pending : pending_) waits.push_back({pending.socket.get(), POLLIN, 0});
    const timespec timeout = absl::ToTimespec(std::clamp(until - absl::Now(), absl::ZeroDuration(), absl::Hours(24)));
    const int ready = ::ppoll(waits.data(), waits.size(), &timeout, nullptr);
    MOONPIPE_RETURN_IF_ERROR(cancellation_.reason());
    if (ready < 0 && errno != EINTR) return SystemError("poll failed");
    if (ready <= 0 && absl::Now() >= deadline_) {
      return absl::DeadlineExceededError(absl::StrCat(
          "worker ", endpoint_.peer_worker, " did not connect in time",
          last_refusal_.ok() ? "" : absl::StrCat("; the last that came was refused: ", last_refusal_.message())));
    }
    return absl::OkStatus();
  }

  void Accept(int listener, const char* transport) {
    while (listener >= 0 && !Full()) {
      UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.valid()) return;
      auto challenge = MakeChallenge();
      // A fresh socket's buffer takes these few bytes at once; where not, the peer is none to wait for.
      if (!challenge.ok() || !SendNow(socket.get(), *challenge)) continue;
      if (std::strcmp(transport, "tcp") == 0) SetNoDelay(socket.get());
      pending_.push_back({std::move(socket), transport, *std::move(challenge), "", absl::Now()});
    }
  }

  static bool SendNow(int socket, const std::string& bytes) {
    return ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
  }

  // True once the right peer has been told so; an error where this connection is over.
  absl::StatusOr<bool> Advance(Pending& pending) {
    while (true) {
      MOONPIPE_ASSIGN_OR_RETURN(const size_t length, HelloLength(pending.hello));
      if (length != 0 && pending.hello.size() == length) break;
      // Never beyond the hello: what follows belongs to the edge.
      char bytes[kMaxHelloBytes];
      const size_t wanted = length == 0 ? 12 - pending.hello.size() : length - pending.hello.size();
      const ssize_t got = ::recv(pending.socket.get(), bytes, wanted, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
      if (got <= 0) return absl::UnavailableError("peer closed the connection in the handshake");
      pending.hello.append(bytes, static_cast<size_t>(got));
    }
    const absl::Status judgement = CheckHello(pending.hello, identity_, endpoint_.token, pending.challenge);
    const bool told =
        SendNow(pending.socket.get(), MakeReply(judgement, endpoint_.token, pending.challenge, pending.hello));
    MOONPIPE_RETURN_IF_ERROR(judgement);
    if (!told) return absl::UnavailableError("peer closed the connection in the handshake");
    return true;
  }

  const EdgeEndpoint& endpoint_;
  const EdgeIdentity& identity_;
  Cancellation& cancellation_;
  const absl::Time deadline_;
  UnixListener unix_;
  UniqueFd tcp_;
  std::list<Pending> pending_;
  absl::Status last_refusal_;
};

// Blocks until connected, to the deadline.
absl::Status DialAddress(int socket, const sockaddr* address, socklen_t length, Cancellation& cancellation,
                         absl::Time deadline) {
  if (::connect(socket, address, length) == 0) return absl::OkStatus();
  if (errno != EINPROGRESS && errno != EINTR) return SystemError("cannot connect");
  while (true) {
    MOONPIPE_ASSIGN_OR_RETURN(const short events, WaitForSocket(socket, POLLOUT, cancellation, deadline));
    if (events != 0) break;
  }
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
  errno = error;
  return error == 0 ? absl::OkStatus() : SystemError("cannot connect");
}

absl::StatusOr<Connected> DialUnix(const std::string& path, Cancellation& cancellation, absl::Time deadline) {
  if (path.empty()) return absl::UnavailableError("listener has no Unix socket");
  const std::optional<UnixName> name = MakeUnixName(path);
  if (!name) return absl::UnavailableError(absl::StrCat("path of ", path.size(), " bytes is too long for a Unix socket"));
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return SystemError("cannot open a Unix socket");
  MOONPIPE_RETURN_IF_ERROR(
      Annotate(DialAddress(socket.get(), reinterpret_cast<const sockaddr*>(&name->address), name->length, cancellation, deadline),
               path));
  return Connected{std::move(socket), "unix"};
}

absl::StatusOr<Connected> DialTcp(const EdgeAddress& address, Cancellation& cancellation, absl::Time deadline) {
  MOONPIPE_ASSIGN_OR_RETURN(const Addresses addresses, Resolve(address.host, address.port, 0));
  absl::Status last;
  for (const addrinfo* entry = addresses.get(); entry != nullptr; entry = entry->ai_next) {
    UniqueFd socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.valid()) return SystemError("cannot open a TCP socket");
    SetNoDelay(socket.get());
    last = DialAddress(socket.get(), entry->ai_addr, entry->ai_addrlen, cancellation, deadline);
    if (last.ok()) return Connected{std::move(socket), "tcp"};
  }
  return Annotate(last, absl::StrCat(address.host, " port ", address.port));
}

absl::StatusOr<Connected> Dial(const EdgeEndpoint& endpoint, const EdgeIdentity& identity, Rendezvous* rendezvous,
                               Cancellation& cancellation, absl::Time deadline) {
  MOONPIPE_ASSIGN_OR_RETURN(const std::string published, rendezvous->Get(EdgeAddressKey(endpoint), deadline));
  MOONPIPE_ASSIGN_OR_RETURN(const EdgeAddress address, EdgeAddress::Decode(published));
  absl::StatusOr<Connected> connected = absl::UnavailableError("not on this host");
  if (!endpoint.prefer_tcp && !endpoint.boot_id.empty() && endpoint.boot_id == address.boot_id) {
    connected = DialUnix(address.unix_path, cancellation, deadline);
  }
  if (!connected.ok()) connected = DialTcp(address, cancellation, deadline);
  MOONPIPE_RETURN_IF_ERROR(connected.status());

  const int socket = connected->socket.get();
  std::string challenge(kChallengeBytes, '\0');
  MOONPIPE_RETURN_IF_ERROR(
      Annotate(ReadFully(socket, challenge.data(), challenge.size(), cancellation, deadline), "no challenge came"));
  MOONPIPE_RETURN_IF_ERROR(CheckChallenge(challenge));
  MOONPIPE_ASSIGN_OR_RETURN(std::string hello, MakeHello(identity, endpoint.token, challenge));
  iovec part = {hello.data(), hello.size()};
  MOONPIPE_RETURN_IF_ERROR(WriteFully(socket, absl::MakeSpan(&part, 1), cancellation, deadline));
  std::string reply(kReplyHeadBytes, '\0');
  MOONPIPE_RETURN_IF_ERROR(
      Annotate(ReadFully(socket, reply.data(), reply.size(), cancellation, deadline), "no answer to the handshake came"));
  MOONPIPE_ASSIGN_OR_RETURN(const size_t length, ReplyLength(reply));
  reply.resize(length);
  MOONPIPE_RETURN_IF_ERROR(
      ReadFully(socket, reply.data() + kReplyHeadBytes, length - kReplyHeadBytes, cancellation, deadline));
  MOONPIPE_RETURN_IF_ERROR(Annotate(CheckReply(reply, endpoint.token, challenge, hello), "refused by the listener"));
  return connected;
}

absl::StatusOr<Connected> Connect(const EdgeEndpoint& endpoint, bool sends, Rendezvous* rendezvous, absl::Time deadline) {
  if (endpoint.name.empty()) return absl::InvalidArgumentError("name is empty");
  if (endpoint.self_worker == endpoint.peer_worker) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker ", endpoint.self_worker, " cannot have an edge with itself; hand the tensor over in memory"));
  }
  if (endpoint.capacity == 0) return absl::InvalidArgumentError("capacity is 0, must be at least 1");
  const EdgeIdentity identity = {.run = endpoint.run,
                                 .name = endpoint.name,
                                 .generation = endpoint.generation,
                                 .sender = sends ? endpoint.self_worker : endpoint.peer_worker,
                                 .receiver = sends ? endpoint.peer_worker : endpoint.self_worker,
                                 .dialer = std::max(endpoint.self_worker, endpoint.peer_worker)};
  Cancellation never;
  Cancellation& cancellation = endpoint.cancellation != nullptr ? *endpoint.cancellation : never;
  if (endpoint.self_worker < endpoint.peer_worker) {
    return Listener(endpoint, identity, cancellation, deadline).Run(rendezvous);
  }
  return Dial(endpoint, identity, rendezvous, cancellation, deadline);
}

SocketEdgeOptions EdgeOptions(const EdgeEndpoint& endpoint, const Connected& connected) {
  return {.name = endpoint.name,
          .transport = connected.transport,
          .max_message_bytes = endpoint.max_message_bytes,
          .capacity = endpoint.capacity};
}

}  // namespace

std::string ReadBootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string line;
  std::getline(file, line);
  return std::string(absl::StripAsciiWhitespace(line));
}

std::string EdgeAddressKey(const EdgeEndpoint& endpoint) {
  return absl::StrCat("edge/", endpoint.generation, "/", endpoint.name);
}

absl::StatusOr<std::unique_ptr<SendEdge>> ConnectSendEdge(const EdgeEndpoint& endpoint, Rendezvous* rendezvous,
                                                          absl::Time deadline) {
  absl::StatusOr<Connected> connected = Connect(endpoint, true, rendezvous, deadline);
  if (!connected.ok()) return Annotate(connected.status(), absl::StrCat("edge ", endpoint.name));
  return MakeSocketSendEdge(std::move(connected->socket), EdgeOptions(endpoint, *connected));
}

absl::StatusOr<std::unique_ptr<ReceiveEdge>> ConnectReceiveEdge(const EdgeEndpoint& endpoint, Rendezvous* rendezvous,
                                                                absl::Time deadline) {
  absl::StatusOr<Connected> connected = Connect(endpoint, false, rendezvous, deadline);
  if (!connected.ok()) return Annotate(connected.status(), absl::StrCat("edge ", endpoint.name));
  return MakeSocketReceiveEdge(std::move(connected->socket), EdgeOptions(endpoint, *connected));
}

}  // namespace moonpipe
