#include "moonpipe/comm/edge_connector.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "edge_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/comm/in_memory_rendezvous.h"

namespace moonpipe {
namespace {

using ::testing::HasSubstr;

// Worker 1 sends to worker 2, so worker 1 listens.
EdgeEndpoint SenderEnd() {
  return {.name = "activation.0", .run = "digits", .generation = 3, .self_worker = 1, .peer_worker = 2, .token = "secret",
          .max_message_bytes = 1 << 20, .boot_id = "this-host", .socket_folder = testing::TempDir()};
}
EdgeEndpoint ReceiverEnd() {
  EdgeEndpoint end = SenderEnd();
  std::swap(end.self_worker, end.peer_worker);
  return end;
}

struct Built {
  absl::StatusOr<std::unique_ptr<SendEdge>> sender = absl::UnknownError("not built");
  absl::StatusOr<std::unique_ptr<ReceiveEdge>> receiver = absl::UnknownError("not built");
};

Built Build(const EdgeEndpoint& sender, const EdgeEndpoint& receiver, Rendezvous& rendezvous, absl::Time deadline = Soon()) {
  Built built;
  std::thread listening([&] { built.sender = ConnectSendEdge(sender, &rendezvous, deadline); });
  built.receiver = ConnectReceiveEdge(receiver, &rendezvous, deadline);
  listening.join();
  return built;
}

void ExpectCarries(Built& built, const std::string& transport) {
  ASSERT_TRUE(built.sender.ok()) << built.sender.status();
  ASSERT_TRUE(built.receiver.ok()) << built.receiver.status();
  EXPECT_EQ((*built.sender)->transport(), transport);
  EXPECT_EQ((*built.receiver)->transport(), transport);
  std::vector<uint8_t> got(300000);
  ASSERT_TRUE((*built.sender)->Send(BytesHeader(300000), PayloadOf(MakeBytes(300000)), Soon()).ok());
  ASSERT_TRUE((*built.receiver)->Receive(BytesHeader(300000), got.data(), Soon()).ok());
  EXPECT_TRUE(got == *MakeBytes(300000));
}

// What the listener published: boot id, Unix path, host, port.
std::vector<std::string> Published(Rendezvous& rendezvous) {
  return absl::StrSplit(*rendezvous.Get("edge/3/activation.0", Soon()), '\n');
}

UniqueFd DialPort(const std::string& port) {
  uint32_t number = 0;
  EXPECT_TRUE(absl::SimpleAtoi(port, &number));
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(number));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  return socket;
}

TEST(EdgeConnector, OneHostMeansAUnixSocketAndLeavesNoFile) {
  EdgeEndpoint sender = SenderEnd();
  EdgeEndpoint receiver = ReceiverEnd();
  sender.socket_folder = receiver.socket_folder = testing::TempDir() + "/sockets";
  std::filesystem::create_directories(sender.socket_folder);
  InMemoryRendezvous rendezvous;
  Built built = Build(sender, receiver, rendezvous);
  ExpectCarries(built, "unix");
  EXPECT_THAT(Published(rendezvous)[1], HasSubstr(sender.socket_folder));
  EXPECT_TRUE(std::filesystem::is_empty(sender.socket_folder));
}

TEST(EdgeConnector, TheWorkerThatReceivesMayBeTheOneThatListens) {
  EdgeEndpoint sender = SenderEnd();
  EdgeEndpoint receiver = ReceiverEnd();
  std::swap(sender.self_worker, sender.peer_worker);
  std::swap(receiver.self_worker, receiver.peer_worker);
  InMemoryRendezvous rendezvous;
  Built built = Build(sender, receiver, rendezvous);
  ExpectCarries(built, "unix");
}

TEST(EdgeConnector, OtherHostsAndPreferenceMeanTcp) {
  EdgeEndpoint receiver = ReceiverEnd();
  receiver.boot_id = "other-host";
  InMemoryRendezvous rendezvous;
  Built built = Build(SenderEnd(), receiver, rendezvous);
  ExpectCarries(built, "tcp");

  EdgeEndpoint sender = SenderEnd();
  sender.prefer_tcp = true;
  InMemoryRendezvous second;
  built = Build(sender, ReceiverEnd(), second);
  ExpectCarries(built, "tcp");
}

TEST(EdgeConnector, ALongFolderGetsAnAbstractSocket) {
  EdgeEndpoint sender = SenderEnd();
  sender.socket_folder = testing::TempDir() + std::string(120, 'x');
  InMemoryRendezvous rendezvous;
  Built built = Build(sender, ReceiverEnd(), rendezvous);
  ExpectCarries(built, "unix");
  EXPECT_EQ(Published(rendezvous)[1][0], '@');
}

TEST(EdgeConnector, AUnixPathThatCannotBeReachedFallsBackToTcp) {
  InMemoryRendezvous rendezvous;
  // As from another container of the same host: the path is not there.
  class OtherMounts : public Rendezvous {
   public:
    explicit OtherMounts(Rendezvous& inner) : inner_(inner) {}
    absl::Status Set(const std::string& key, const std::string& value) override {
      std::vector<std::string> lines = absl::StrSplit(value, '\n');
      return inner_.Set(key, lines[0] + "\n/nowhere/edge\n" + lines[2] + "\n" + lines[3]);
    }
    absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override { return inner_.Get(key, deadline); }

   private:
    Rendezvous& inner_;
  } other_mounts(rendezvous);
  Built built = Build(SenderEnd(), ReceiverEnd(), other_mounts);
  ExpectCarries(built, "tcp");
}

TEST(EdgeConnector, StrangersDoNotDisturbTheListener) {
  InMemoryRendezvous rendezvous;
  Built built;
  std::thread listening([&] { built.sender = ConnectSendEdge(SenderEnd(), &rendezvous, Soon()); });
  const std::string port = Published(rendezvous)[3];
  // More than may be pending at once; most of them say nothing, and stay.
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 40; ++i) strangers.push_back(DialPort(port));
  const std::string request = "GET / HTTP/1.1\r\n\r\n";
  EXPECT_GT(::send(strangers[39].get(), request.data(), request.size(), MSG_NOSIGNAL), 0);
  strangers[38].Reset();
  // The right head, then a length that must not be believed.
  std::string huge = std::string("MPH1") + std::string("\1\0\0\0", 4) + std::string("\xff\xff\xff\x7f", 4);
  EXPECT_GT(::send(strangers[37].get(), huge.data(), huge.size(), MSG_NOSIGNAL), 0);
  EdgeEndpoint receiver = ReceiverEnd();
  receiver.prefer_tcp = true;  // So that it stands in the same line behind them.
  built.receiver = ConnectReceiveEdge(receiver, &rendezvous, Soon());
  listening.join();
  ExpectCarries(built, "tcp");
}

// A peer that is refused, and after it the right one.
void ExpectRefused(const EdgeEndpoint& wrong, absl::StatusCode code, const std::string& words) {
  InMemoryRendezvous rendezvous;
  Built built;
  std::thread listening([&] { built.sender = ConnectSendEdge(SenderEnd(), &rendezvous, Soon()); });
  const absl::Status refused = wrong.self_worker == 1
                                   ? ConnectReceiveEdge(wrong, &rendezvous, Soon()).status()
                                   : [&] {
                                       // It finds the address although its own key differs.
                                       const std::string address = *rendezvous.Get("edge/3/activation.0", Soon());
                                       EXPECT_TRUE(rendezvous.Set(EdgeAddressKey(wrong), address).ok());
                                       return ConnectReceiveEdge(wrong, &rendezvous, Soon()).status();
                                     }();
  EXPECT_EQ(refused.code(), code) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("refused by the listener"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr(words));
  built.receiver = ConnectReceiveEdge(ReceiverEnd(), &rendezvous, Soon());
  listening.join();
  ExpectCarries(built, "unix");
}

TEST(EdgeConnector, AStaleGenerationIsAbortedWithBothNumbers) {
  EdgeEndpoint wrong = ReceiverEnd();
  wrong.generation = 2;
  wrong.token = "an older secret";
  ExpectRefused(wrong, absl::StatusCode::kAborted, "peer is of generation 2, this edge of generation 3; it is stale");
}

TEST(EdgeConnector, AWrongTokenIsDenied) {
  EdgeEndpoint wrong = ReceiverEnd();
  wrong.token = "guess";
  ExpectRefused(wrong, absl::StatusCode::kPermissionDenied, "does not know the token");
}

TEST(EdgeConnector, AnotherRunEdgeOrWorkerIsRefused) {
  EdgeEndpoint wrong = ReceiverEnd();
  wrong.run = "letters";
  ExpectRefused(wrong, absl::StatusCode::kFailedPrecondition, "run \"letters\"");
  wrong = ReceiverEnd();
  wrong.name = "activation.1";
  ExpectRefused(wrong, absl::StatusCode::kFailedPrecondition, "edge \"activation.1\"");
  wrong = ReceiverEnd();
  wrong.self_worker = 5;
  ExpectRefused(wrong, absl::StatusCode::kFailedPrecondition, "dialed by worker 5");
}

TEST(EdgeConnector, TwoSendersAreRefused) {
  InMemoryRendezvous rendezvous;
  absl::Status listener;
  std::thread listening([&] { listener = ConnectSendEdge(SenderEnd(), &rendezvous, In(300)).status(); });
  const absl::Status dialer = ConnectSendEdge(ReceiverEnd(), &rendezvous, Soon()).status();
  listening.join();
  EXPECT_EQ(dialer.code(), absl::StatusCode::kFailedPrecondition) << dialer;
  EXPECT_EQ(listener.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(listener.message()), HasSubstr("edge activation.0: worker 2 did not connect in time"));
  EXPECT_THAT(std::string(listener.message()), HasSubstr("the last that came was refused: peer connects for"));
}

TEST(EdgeConnector, AListenerThatDoesNotKnowTheTokenIsFoundOut) {
  // It takes over the address and accepts everyone.
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(listener.get(), 4), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  InMemoryRendezvous rendezvous;
  ASSERT_TRUE(rendezvous.Set("edge/3/activation.0", "x\n\n127.0.0.1\n" + std::to_string(ntohs(address.sin_port))).ok());
  std::thread impostor([&] {
    UniqueFd socket(::accept(listener.get(), nullptr, nullptr));
    const std::string challenge = std::string("MPH1\1\0\0\0", 8) + std::string(16, 'n');
    const std::string reply = std::string("MPH1", 4) + std::string(8 + 32, '\0');
    ASSERT_EQ(::send(socket.get(), challenge.data(), challenge.size(), MSG_NOSIGNAL), 24);
    ASSERT_EQ(::send(socket.get(), reply.data(), reply.size(), MSG_NOSIGNAL), 44);
    char bytes[4096];
    while (::recv(socket.get(), bytes, sizeof bytes, 0) > 0) {
    }
  });
  const absl::Status status = ConnectReceiveEdge(ReceiverEnd(), &rendezvous, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
  impostor.join();
}

TEST(EdgeConnector, EveryWaitHasItsDeadline) {
  InMemoryRendezvous rendezvous;
  // No listener: the key is never set.
  EXPECT_THAT(ConnectReceiveEdge(ReceiverEnd(), &rendezvous, In(10)).status().ToString(),
              HasSubstr("DEADLINE_EXCEEDED: edge activation.0: no worker has set the key \"edge/3/activation.0\""));
  // A listener that accepts and says nothing.
  UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = testing::TempDir() + "/silent-" + std::to_string(::getpid());
  std::copy(path.begin(), path.end(), address.sun_path);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(listener.get(), 4), 0);
  ASSERT_TRUE(rendezvous.Set("edge/3/activation.0", "this-host\n" + path + "\n127.0.0.1\n1").ok());
  EXPECT_THAT(ConnectReceiveEdge(ReceiverEnd(), &rendezvous, In(10)).status().ToString(),
              HasSubstr("DEADLINE_EXCEEDED: edge activation.0: no challenge came"));
  ::unlink(path.c_str());
}

TEST(EdgeConnector, CancellationEndsTheListenerAtOnce) {
  Cancellation cancellation;
  EdgeEndpoint sender = SenderEnd();
  sender.cancellation = &cancellation;
  InMemoryRendezvous rendezvous;
  std::thread cancelling([&] {
    Published(rendezvous);
    cancellation.Cancel(absl::AbortedError("worker 2 is lost"));
  });
  const absl::Status status = ConnectSendEdge(sender, &rendezvous, absl::InfiniteFuture()).status();
  cancelling.join();
  EXPECT_EQ(status, absl::AbortedError("edge activation.0: worker 2 is lost"));
}

TEST(EdgeConnector, RefusesEndpointsThatCannotBe) {
  InMemoryRendezvous rendezvous;
  EdgeEndpoint end = SenderEnd();
  end.peer_worker = 1;
  EXPECT_THAT(ConnectSendEdge(end, &rendezvous, Soon()).status().ToString(), HasSubstr("worker 1 cannot have an edge with itself"));
  end = SenderEnd();
  end.capacity = 0;
  EXPECT_EQ(ConnectSendEdge(end, &rendezvous, Soon()).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(EdgeConnector, ThisHostHasABootId) { EXPECT_EQ(ReadBootId().size(), 36u); }

}  // namespace
}  // namespace moonpipe
