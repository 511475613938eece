#include "services/coordinator/worker_hub.h"

#include <thread>

#include "gmock/gmock.h"
#include "moonpipe/runtime/rpc_error.h"
#include "tests/services/hub_test_util.h"

namespace moonpipe {
namespace {

using common::v1::WORKER_ROLE_DATALOADER;
using common::v1::WORKER_ROLE_DECODER_STAGE;
using common::v1::WORKER_ROLE_UNSPECIFIED;
using testing::HasSubstr;
using worker::v1::ConnectRequest;
using worker::v1::ConnectResponse;

TEST(WorkerHubTest, RegistersWorkersUnderNumbersOfItsOwn) {
  HubServer server;
  const auto first = server.Connect(RegistrationOf(WORKER_ROLE_DECODER_STAGE, 0));
  const auto second = server.Connect(RegistrationOf(WORKER_ROLE_DECODER_STAGE, 1));
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE((*first)->worker(), (*second)->worker());
  const std::vector<WorkerInfo> workers = server.hub.Workers();
  ASSERT_EQ(workers.size(), 2u);
  EXPECT_EQ(workers[1].ShortName(), "decoder stage 1");
  EXPECT_EQ(workers[1].ToString(), absl::StrCat("decoder stage 1 (worker ", (*second)->worker(), ", pid 101)"));
}

TEST(WorkerHubTest, RefusesAWorkerOfOtherProtos) {
  HubServer server;
  worker::v1::Register registration = RegistrationOf(WORKER_ROLE_DATALOADER);
  registration.set_proto_digest("another digest");
  const absl::Status refused = server.Connect(registration).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("dataloader was built from other protos"));
  EXPECT_TRUE(server.hub.Workers().empty());
}

TEST(WorkerHubTest, RefusesASecondWorkerInAPlaceUntilTheFirstHasLeft) {
  HubServer server;
  auto first = server.Connect(RegistrationOf(WORKER_ROLE_DECODER_STAGE, 3));
  ASSERT_TRUE(first.ok());
  const absl::Status refused = server.Connect(RegistrationOf(WORKER_ROLE_DECODER_STAGE, 3)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("there is a decoder stage 3"));
  first->reset();
  while (!server.hub.Workers().empty()) std::this_thread::yield();
  EXPECT_TRUE(server.Connect(RegistrationOf(WORKER_ROLE_DECODER_STAGE, 3)).ok());
}

TEST(WorkerHubTest, RefusesAWorkerWithoutARole) {
  HubServer server;
  EXPECT_EQ(server.Connect(RegistrationOf(WORKER_ROLE_UNSPECIFIED)).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(WorkerHubTest, AStreamThatBeginsWithAnythingElseEndsWithItsReason) {
  HubServer server;
  const auto stub = worker::v1::WorkerService::NewStub(MakeChannel(server.server->address()));
  grpc::ClientContext context;
  const auto stream = stub->Connect(&context);
  ConnectRequest event;
  event.mutable_heartbeat();
  ASSERT_TRUE(stream->Write(event));
  ConnectResponse nothing;
  EXPECT_FALSE(stream->Read(&nothing));
  const absl::Status ended = FromGrpcStatus(stream->Finish());
  EXPECT_EQ(ErrorReason(ended), "NOT_REGISTERED");
  EXPECT_EQ(GetDetail<google::rpc::ErrorInfo>(ended)->domain(), kErrorDomain);
}

TEST(WorkerHubTest, RendezvousAnswersWhoeverAskedBeforeAndAfter) {
  HubServer server;
  server.hub.BeginGeneration(5);
  const auto asker = server.Connect(RegistrationOf(WORKER_ROLE_DECODER_STAGE, 0));
  const auto teller = server.Connect(RegistrationOf(WORKER_ROLE_DECODER_STAGE, 1));
  ASSERT_TRUE(asker.ok() && teller.ok());
  absl::StatusOr<std::string> early;
  std::thread waiting([&] { early = (*asker)->MakeRendezvous(5)->Get("edge/features", Soon()); });
  ASSERT_TRUE((*teller)->MakeRendezvous(5)->Set("edge/features", "an address").ok());
  waiting.join();
  ASSERT_TRUE(early.ok()) << early.status();
  EXPECT_EQ(*early, "an address");
  EXPECT_EQ(*(*teller)->MakeRendezvous(5)->Get("edge/features", Soon()), "an address");
}

TEST(WorkerHubTest, RendezvousForgetsAnOlderGeneration) {
  HubServer server;
  server.hub.BeginGeneration(5);
  const auto worker = server.Connect(RegistrationOf(WORKER_ROLE_DECODER_STAGE, 0));
  ASSERT_TRUE(worker.ok());
  ASSERT_TRUE((*worker)->MakeRendezvous(5)->Set("edge/features", "an address").ok());
  ASSERT_TRUE((*worker)->MakeRendezvous(5)->Get("edge/features", Soon()).ok());
  server.hub.BeginGeneration(6);
  // A value of the old plan is not taken for the new one's.
  ASSERT_TRUE((*worker)->MakeRendezvous(5)->Set("edge/features", "a stale address").ok());
  ASSERT_TRUE((*worker)->MakeRendezvous(6)->Set("another", "x").ok());
  ASSERT_TRUE((*worker)->MakeRendezvous(6)->Get("another", Soon()).ok());  // all before it was handled
  EXPECT_EQ((*worker)->MakeRendezvous(6)->Get("edge/features", absl::Now() + absl::Milliseconds(200)).status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(WorkerHubTest, TellsOfEventsAndOfTheEndOfAStream) {
  HubServer server;
  auto worker = server.Connect(RegistrationOf(WORKER_ROLE_DATALOADER));
  ASSERT_TRUE(worker.ok());
  const uint32_t number = (*worker)->worker();
  EXPECT_TRUE(server.hub.Next(Soon())->message.has_register_());
  ConnectRequest event;
  event.mutable_plan_ready()->set_generation(9);
  (*worker)->Send(event);
  const auto told = server.hub.Next(Soon());
  ASSERT_TRUE(told.ok());
  EXPECT_EQ(told->worker, number);
  EXPECT_EQ(told->message.plan_ready().generation(), 9u);
  worker->reset();
  EXPECT_TRUE(server.hub.Next(Soon())->disconnected);
  EXPECT_EQ(server.hub.Send(number, {}).code(), absl::StatusCode::kNotFound);
}

TEST(WorkerHubTest, ShutdownDrainsWorkersAndWaitsForThem) {
  HubServer server;
  auto worker = server.Connect(RegistrationOf(WORKER_ROLE_DATALOADER));
  ASSERT_TRUE(worker.ok());
  std::string reason;
  std::thread serving([&] {
    reason = (*worker)->Next(Soon())->drain().reason();
    worker->reset();
  });
  server.hub.Shutdown(absl::Seconds(60));
  EXPECT_TRUE(server.hub.Workers().empty());
  serving.join();
  EXPECT_EQ(reason, "the coordinator is ending");
  EXPECT_EQ(server.Connect(RegistrationOf(WORKER_ROLE_DATALOADER)).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace moonpipe
