#include "moonpipe/comm/socket_edge.h"

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "edge_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/comm/crc32c.h"
#include "moonpipe/comm/frame.h"

namespace moonpipe {
namespace {

using ::testing::HasSubstr;

struct Ends {
  std::unique_ptr<SendEdge> sender;
  std::unique_ptr<ReceiveEdge> receiver;
};

SocketEdgeOptions Options(uint64_t max_message_bytes = 64 << 20, size_t capacity = 8) {
  return {.name = "activation.0", .transport = "unix", .max_message_bytes = max_message_bytes, .capacity = capacity};
}

Ends MakeEnds(const SocketEdgeOptions& options = Options()) {
  auto [a, b] = SocketPair();
  return {*MakeSocketSendEdge(std::move(a), options), *MakeSocketReceiveEdge(std::move(b), options)};
}

// A whole message as it stands on the wire.
std::string Wire(const MessageHeader& header, const std::vector<uint8_t>& payload) {
  const FrameHeader frame = *EncodeFrameHeader(header);
  std::string bytes(frame.begin(), frame.end());
  bytes.append(payload.begin(), payload.end());
  const FrameTrailer trailer = EncodeFrameTrailer(Crc32c(bytes.data(), bytes.size()));
  bytes.append(trailer.begin(), trailer.end());
  return bytes;
}

void WriteRaw(int fd, const std::string& bytes) {
  ASSERT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

// A receiver whose peer is the test itself.
struct RawPeer {
  UniqueFd socket;
  std::unique_ptr<ReceiveEdge> receiver;
};
RawPeer MakeRawPeer(const SocketEdgeOptions& options = Options()) {
  auto [a, b] = SocketPair();
  return {std::move(a), *MakeSocketReceiveEdge(std::move(b), options)};
}

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("edge activation.0"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(words));
}

TEST(SocketEdge, CarriesEverySizeInOrderAndCountsExactly) {
  Ends ends = MakeEnds();
  // 8,921,088 bytes: the features of one 1000x1000 picture, 1089 rows of 2048 floats.
  const std::vector<int64_t> sizes = {0, 1, 3, 4096, 0, 262143, 262144, 262145, 1 << 20, 8921088, 16 << 20, 7};
  std::thread sending([&] {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const auto data = MakeBytes(sizes[i], static_cast<uint32_t>(i));
      ASSERT_TRUE(ends.sender->Send(BytesHeader(sizes[i], static_cast<uint32_t>(i)), PayloadOf(data), Soon()).ok());
    }
    ASSERT_TRUE(ends.sender->Flush(Soon()).ok());
  });
  uint64_t total = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::vector<uint8_t> got(static_cast<size_t>(sizes[i]));
    const absl::Status status = ends.receiver->Receive(BytesHeader(sizes[i], static_cast<uint32_t>(i)), got.data(), Soon());
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(got == *MakeBytes(sizes[i], static_cast<uint32_t>(i))) << "message " << i;
    total += static_cast<uint64_t>(sizes[i]);
  }
  sending.join();
  for (const EdgeCounters& counters : {ends.sender->counters(), ends.receiver->counters()}) {
    EXPECT_EQ(counters.messages, sizes.size());
    EXPECT_EQ(counters.payload_bytes, total);
    EXPECT_EQ(counters.frame_bytes, sizes.size() * 116);
  }
}

TEST(SocketEdge, GivesTheSameBytesWhetherReceiveWaitsOrComesLater) {
  Ends ends = MakeEnds();
  std::vector<uint8_t> got(5 << 20);
  // First read ahead, then straight into memory that waits.
  ASSERT_TRUE(ends.sender->Send(BytesHeader(5 << 20, 0), PayloadOf(MakeBytes(5 << 20, 1)), Soon()).ok());
  while (!ends.receiver->Ready()) std::this_thread::yield();
  ASSERT_TRUE(ends.receiver->Receive(BytesHeader(5 << 20, 0), got.data(), Soon()).ok());
  EXPECT_TRUE(got == *MakeBytes(5 << 20, 1));
  EXPECT_FALSE(ends.receiver->Ready());
  std::thread receiving([&] { EXPECT_TRUE(ends.receiver->Receive(BytesHeader(5 << 20, 1), got.data(), Soon()).ok()); });
  ASSERT_TRUE(ends.sender->Send(BytesHeader(5 << 20, 1), PayloadOf(MakeBytes(5 << 20, 2)), Soon()).ok());
  receiving.join();
  EXPECT_TRUE(got == *MakeBytes(5 << 20, 2));
}

TEST(SocketEdge, KeepsTheOwnerUntilWrittenAndLetsItGoAfterFlush) {
  Ends ends = MakeEnds();
  auto data = MakeBytes(6 << 20);
  const std::weak_ptr<std::vector<uint8_t>> watch = data;
  ASSERT_TRUE(ends.sender->Send(BytesHeader(6 << 20), PayloadOf(data), Soon()).ok());
  data.reset();
  std::vector<uint8_t> got(6 << 20);
  ASSERT_TRUE(ends.receiver->Receive(BytesHeader(6 << 20), got.data(), Soon()).ok());
  EXPECT_TRUE(got == *MakeBytes(6 << 20));
  ASSERT_TRUE(ends.sender->Flush(Soon()).ok());
  EXPECT_TRUE(watch.expired());
}

TEST(SocketEdge, AnotherMessageThanExpectedNamesBoth) {
  Ends ends = MakeEnds();
  ASSERT_TRUE(ends.sender->Send(BytesHeader(16, 1), PayloadOf(MakeBytes(16)), Soon()).ok());
  std::vector<uint8_t> got(16);
  ExpectStatus(ends.receiver->Receive(BytesHeader(16, 2), got.data(), Soon()), absl::StatusCode::kFailedPrecondition,
               "expected generation 3 step 12 microbatch 2 uint8[16], got generation 3 step 12 microbatch 1 uint8[16]");
  ExpectStatus(ends.receiver->Receive(BytesHeader(16, 1), got.data(), Soon()), absl::StatusCode::kFailedPrecondition,
               "expected generation 3");
  // The sender hears of it too.
  while (ends.sender->Send(BytesHeader(16, 2), PayloadOf(MakeBytes(16)), Soon()).ok()) std::this_thread::yield();
  ExpectStatus(ends.sender->Send(BytesHeader(16, 2), PayloadOf(MakeBytes(16)), Soon()), absl::StatusCode::kUnavailable,
               "peer closed the connection");
}

TEST(SocketEdge, ACorruptByteAnywhereIsNeverGivenAsGood) {
  const std::string good = Wire(BytesHeader(100), *MakeBytes(100));
  for (size_t at = 0; at < good.size(); ++at) {
    RawPeer peer = MakeRawPeer(Options(200));
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    WriteRaw(peer.socket.get(), bad);
    peer.socket.Reset();
    std::vector<uint8_t> got(100);
    const absl::Status status = peer.receiver->Receive(BytesHeader(100), got.data(), Soon());
    ASSERT_FALSE(status.ok()) << "byte " << at;
    ASSERT_THAT(std::string(status.message()), HasSubstr("edge activation.0"));
    if (at >= kFrameHeaderBytes) {
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      ASSERT_THAT(std::string(status.message()), HasSubstr("checksum is 0x"));
    }
  }
}

TEST(SocketEdge, TakesMessagesThatComeByteByByte) {
  RawPeer peer = MakeRawPeer();
  std::thread sending([&] {
    for (const char byte : Wire(BytesHeader(50), *MakeBytes(50))) WriteRaw(peer.socket.get(), std::string(1, byte));
  });
  std::vector<uint8_t> got(50);
  EXPECT_TRUE(peer.receiver->Receive(BytesHeader(50), got.data(), Soon()).ok());
  EXPECT_TRUE(got == *MakeBytes(50));
  sending.join();
}

TEST(SocketEdge, GivesWhatArrivedBeforeThePeerClosed) {
  RawPeer peer = MakeRawPeer();
  WriteRaw(peer.socket.get(), Wire(BytesHeader(8, 0), *MakeBytes(8)) + Wire(BytesHeader(8, 1), *MakeBytes(8)));
  peer.socket.Reset();
  std::vector<uint8_t> got(8);
  EXPECT_TRUE(peer.receiver->Receive(BytesHeader(8, 0), got.data(), Soon()).ok());
  EXPECT_TRUE(peer.receiver->Receive(BytesHeader(8, 1), got.data(), Soon()).ok());
  ExpectStatus(peer.receiver->Receive(BytesHeader(8, 2), got.data(), Soon()), absl::StatusCode::kUnavailable,
               "peer closed the connection between two messages");
  EXPECT_TRUE(peer.receiver->Ready()) << "a failed edge does not block";
}

TEST(SocketEdge, ACutMessageTellsHowMuchOfItCame) {
  const std::string whole = Wire(BytesHeader(1000), *MakeBytes(1000));
  for (const size_t cut : {1ul, 111ul, 112ul, 500ul, whole.size() - 1}) {
    RawPeer peer = MakeRawPeer();
    WriteRaw(peer.socket.get(), whole.substr(0, cut));
    peer.socket.Reset();
    std::vector<uint8_t> got(1000);
    ExpectStatus(peer.receiver->Receive(BytesHeader(1000), got.data(), Soon()), absl::StatusCode::kUnavailable,
                 "in the middle of a message, after " + std::to_string(cut) + " bytes");
  }
}

TEST(SocketEdge, ASenderWhosePeerClosesIsToldWithoutSending) {
  auto [a, b] = SocketPair();
  auto sender = *MakeSocketSendEdge(std::move(a), Options());
  b.Reset();
  absl::Status status;
  while (status.ok()) status = sender->Send(BytesHeader(1 << 20), PayloadOf(MakeBytes(1 << 20)), Soon());
  ExpectStatus(status, absl::StatusCode::kUnavailable, "peer closed the connection");
}

TEST(SocketEdge, AStoppedPeerIsADeadlineThatSaysWhatCame) {
  RawPeer silent = MakeRawPeer();
  std::vector<uint8_t> got(1000);
  absl::Status status = silent.receiver->Receive(BytesHeader(1000), got.data(), In(20));
  ExpectStatus(status, absl::StatusCode::kDeadlineExceeded, "for generation 3 step 12 microbatch 0 uint8[1000]; nothing of it came");
  // A busy machine wakes it late, so only the least is sure.
  const std::string words(status.message());
  const size_t begin = words.find("waited ") + 7;
  absl::Duration waited;
  ASSERT_TRUE(absl::ParseDuration(words.substr(begin, words.find(" for ") - begin), &waited)) << words;
  EXPECT_GE(waited, absl::Milliseconds(19)) << words;
  ExpectStatus(silent.receiver->Receive(BytesHeader(1000), got.data(), Soon()), absl::StatusCode::kDeadlineExceeded, "waited");

  RawPeer stopped = MakeRawPeer();
  WriteRaw(stopped.socket.get(), Wire(BytesHeader(1000), *MakeBytes(1000)).substr(0, 612));
  status = stopped.receiver->Receive(BytesHeader(1000), got.data(), In(500));
  ExpectStatus(status, absl::StatusCode::kDeadlineExceeded, "only 612 bytes of the next message came");
}

TEST(SocketEdge, APeerThatDoesNotReadIsADeadlineAtCapacity) {
  auto [a, b] = SocketPair();
  auto sender = *MakeSocketSendEdge(std::move(a), Options(68 << 20, 2));
  const auto data = MakeBytes(8 << 20);
  ASSERT_TRUE(sender->Send(BytesHeader(8 << 20, 0), PayloadOf(data), Soon()).ok());
  ASSERT_TRUE(sender->Send(BytesHeader(8 << 20, 1), PayloadOf(data), Soon()).ok());
  ExpectStatus(sender->Send(BytesHeader(8 << 20, 2), PayloadOf(data), In(30)), absl::StatusCode::kDeadlineExceeded,
               "2 of 2 messages are under way");
  ExpectStatus(sender->Flush(Soon()), absl::StatusCode::kDeadlineExceeded, "2 of 2 messages are under way");
}

TEST(SocketEdge, HoldsAtMostItsCapacityOnBothSides) {
  const uint32_t capacity = 3;
  const auto data = MakeBytes(8 << 20);
  // The reader takes `capacity`, the writer holds `capacity`; one more has no place until one is received.
  Ends full = MakeEnds(Options(64 << 20, capacity));
  Ends drained = MakeEnds(Options(64 << 20, capacity));
  for (uint32_t i = 0; i < 2 * capacity; ++i) {
    ASSERT_TRUE(full.sender->Send(BytesHeader(8 << 20, i), PayloadOf(data), Soon()).ok()) << i;
    ASSERT_TRUE(drained.sender->Send(BytesHeader(8 << 20, i), PayloadOf(data), Soon()).ok()) << i;
  }
  ExpectStatus(full.sender->Send(BytesHeader(8 << 20, 6), PayloadOf(data), In(300)), absl::StatusCode::kDeadlineExceeded,
               "3 of 3 messages are under way");
  EXPECT_EQ(full.receiver->counters().messages, capacity);

  std::thread seventh([&] {
    EXPECT_TRUE(drained.sender->Send(BytesHeader(8 << 20, 6), PayloadOf(data), Soon()).ok());
  });
  std::vector<uint8_t> got(8 << 20);
  for (uint32_t i = 0; i < 7; ++i) {
    ASSERT_TRUE(drained.receiver->Receive(BytesHeader(8 << 20, i), got.data(), Soon()).ok());
    ASSERT_TRUE(got == *data);
  }
  seventh.join();
}

TEST(SocketEdge, AbortFromAnotherThreadWakesEveryWaiter) {
  auto [a, b] = SocketPair();
  auto sender = *MakeSocketSendEdge(std::move(a), Options(64 << 20, 1));
  const auto data = MakeBytes(4 << 20);
  ASSERT_TRUE(sender->Send(BytesHeader(4 << 20), PayloadOf(data), Soon()).ok());
  std::thread sending([&] {
    ExpectStatus(sender->Send(BytesHeader(4 << 20), PayloadOf(data), absl::InfiniteFuture()), absl::StatusCode::kAborted,
                 "generation 4 begins");
  });
  std::thread flushing([&] {
    ExpectStatus(sender->Flush(absl::InfiniteFuture()), absl::StatusCode::kAborted, "generation 4 begins");
  });
  RawPeer peer = MakeRawPeer();
  WriteRaw(peer.socket.get(), Wire(BytesHeader(1000), *MakeBytes(1000)).substr(0, 700));
  std::vector<uint8_t> got(1000);
  std::thread receiving([&] {
    ExpectStatus(peer.receiver->Receive(BytesHeader(1000), got.data(), absl::InfiniteFuture()), absl::StatusCode::kAborted,
                 "generation 4 begins");
  });
  sender->Abort(absl::AbortedError("generation 4 begins"));
  sender->Abort(absl::CancelledError("a later reason does not count"));
  peer.receiver->Abort(absl::AbortedError("generation 4 begins"));
  sending.join();
  flushing.join();
  receiving.join();
  ExpectStatus(sender->Send(BytesHeader(0), {}, Soon()), absl::StatusCode::kAborted, "generation 4 begins");
}

TEST(SocketEdge, AnOversizeMessageIsRefusedOnTheSendersSideAndTheEdgeGoesOn) {
  Ends ends = MakeEnds(Options(5 << 20));
  ExpectStatus(ends.sender->Send(BytesHeader(8921088), PayloadOf(MakeBytes(8921088)), Soon()),
               absl::StatusCode::kInvalidArgument, "message of 8921088 bytes is over the limit of 5242880 bytes");
  std::vector<uint8_t> got(100);
  ExpectStatus(ends.receiver->Receive(BytesHeader(8921088), got.data(), Soon()), absl::StatusCode::kInvalidArgument,
               "message of 8921088 bytes is over the limit of 5242880 bytes");
  ExpectStatus(ends.sender->Send(BytesHeader(100), PayloadOf(MakeBytes(99)), Soon()), absl::StatusCode::kInvalidArgument,
               "payload has 99 bytes but generation 3 step 12 microbatch 0 uint8[100] makes 100");
  ASSERT_TRUE(ends.sender->Send(BytesHeader(100), PayloadOf(MakeBytes(100)), Soon()).ok());
  EXPECT_TRUE(ends.receiver->Receive(BytesHeader(100), got.data(), Soon()).ok());
}

TEST(SocketEdge, AnOversizeMessageFromThePeerEndsTheReceiver) {
  RawPeer peer = MakeRawPeer(Options(1000));
  WriteRaw(peer.socket.get(), Wire(BytesHeader(1001), *MakeBytes(1001)));
  std::vector<uint8_t> got(1000);
  ExpectStatus(peer.receiver->Receive(BytesHeader(1000), got.data(), Soon()), absl::StatusCode::kResourceExhausted,
               "message of 1001 bytes is over the limit of 1000 bytes");
}

TEST(SocketEdge, DestroyingAnEndWithWorkUnderWayEndsCleanly) {
  for (int round = 0; round < 50; ++round) {
    Ends ends = MakeEnds(Options(64 << 20, 2));
    const auto data = MakeBytes(1 << 20);
    ASSERT_TRUE(ends.sender->Send(BytesHeader(1 << 20), PayloadOf(data), Soon()).ok());
    if (round % 2 == 0) {
      ends.sender.reset();
    } else {
      ends.receiver.reset();
    }
  }
}

TEST(SocketEdge, ManyEdgesAndThreadsKeepTheirMessagesApart) {
  constexpr int kEdges = 4;
  constexpr int kMessages = 300;
  std::vector<std::thread> threads;
  std::vector<Ends> edges;
  for (int e = 0; e < kEdges; ++e) edges.push_back(MakeEnds(Options(1 << 20, 3)));
  const auto size = [](int e, int m) { return int64_t{(m * 7919 + e * 104729) % 70000}; };
  for (int e = 0; e < kEdges; ++e) {
    threads.emplace_back([&, e] {
      for (int m = 0; m < kMessages; ++m) {
        const auto data = MakeBytes(size(e, m), static_cast<uint32_t>(e * kMessages + m));
        ASSERT_TRUE(edges[e].sender->Send(BytesHeader(size(e, m), static_cast<uint32_t>(m)), PayloadOf(data), Soon()).ok());
      }
      ASSERT_TRUE(edges[e].sender->Flush(Soon()).ok());
    });
    threads.emplace_back([&, e] {
      for (int m = 0; m < kMessages; ++m) {
        std::vector<uint8_t> got(static_cast<size_t>(size(e, m)));
        const absl::Status status =
            edges[e].receiver->Receive(BytesHeader(size(e, m), static_cast<uint32_t>(m)), got.data(), Soon());
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_TRUE(got == *MakeBytes(size(e, m), static_cast<uint32_t>(e * kMessages + m)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(SocketEdge, RefusesOptionsThatCannotBe) {
  auto [a, b] = SocketPair();
  EXPECT_EQ(MakeSocketSendEdge(std::move(a), Options(1, 0)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeSocketReceiveEdge(UniqueFd(), Options()).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moonpipe
