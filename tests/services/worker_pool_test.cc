#include "services/coordinator/worker_pool.h"

#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/services/hub_test_util.h"

namespace moonpipe {
namespace {

using common::v1::WORKER_ROLE_DECODER_STAGE;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using worker::v1::ConnectRequest;

// Two decoder stages in one pool.
class WorkerPoolTest : public testing::Test {
 protected:
  void SetUp() override {
    for (uint32_t stage = 0; stage < 2; ++stage) {
      auto connected = server_.Connect(RegistrationOf(WORKER_ROLE_DECODER_STAGE, stage));
      ASSERT_TRUE(connected.ok()) << connected.status();
      workers_.push_back(*std::move(connected));
    }
  }
  void MakePool(absl::Duration heartbeat_timeout = absl::Seconds(30)) {
    WorkerPool::Options options;
    options.generation = 4;
    options.heartbeat_timeout = heartbeat_timeout;
    options.gather = absl::Milliseconds(100);
    pool_ = std::make_unique<WorkerPool>(&server_.hub, server_.hub.Workers(), options);
  }
  absl::Status AwaitReady(absl::Time deadline) {
    return pool_->Await(
        "step 7 ran", deadline, [&] { return pool_->ready.size() == 2; },
        [&] {
          std::vector<uint32_t> missing;
          for (const auto& worker : workers_) {
            if (worker != nullptr && !pool_->ready.contains(worker->worker())) missing.push_back(worker->worker());
          }
          return missing;
        });
  }
  void Report(size_t worker, absl::StatusCode code, const std::string& message, const std::string& edge, int microbatch) {
    ConnectRequest event;
    worker::v1::WorkerFailure& failure = *event.mutable_failure();
    failure.set_generation(4);
    failure.set_code(static_cast<int>(code));
    failure.set_message(message);
    failure.set_edge(edge);
    failure.set_microbatch(microbatch);
    failure.set_action("1RA3");
    workers_[worker]->Send(std::move(event));
  }
  // Until the hub has heard what the worker does now.
  void AwaitActivity(uint32_t worker, const std::string& activity) {
    while (pool_->Latest(worker)->activity != activity) std::this_thread::yield();
  }
  void SayReady(size_t worker, uint64_t generation) {
    ConnectRequest event;
    event.mutable_plan_ready()->set_generation(generation);
    workers_[worker]->Send(std::move(event));
  }

  HubServer server_;
  std::vector<std::unique_ptr<CoordinatorClient>> workers_;
  std::unique_ptr<WorkerPool> pool_;
};

TEST_F(WorkerPoolTest, AwaitEndsWhenAllHaveSpoken) {
  MakePool();
  SayReady(0, 4);
  SayReady(1, 4);
  EXPECT_TRUE(AwaitReady(Soon()).ok());
}

TEST_F(WorkerPoolTest, WordsOfAnotherGenerationAreDropped) {
  MakePool();
  SayReady(0, 4);
  SayReady(1, 3);
  const absl::Status late = AwaitReady(absl::Now() + absl::Milliseconds(300));
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(late.message()), AllOf(HasSubstr("while step 7 ran: no answer in time from decoder stage 1"),
                                                 Not(HasSubstr("decoder stage 0")), HasSubstr("raise runtime's timeouts")));
}

TEST_F(WorkerPoolTest, AWorkerThatLeftIsNamedWithTheEdgeOnWhichItsNeighbourWaits) {
  MakePool();
  workers_[0]->SetActivity("0RG2", "gradient.0");
  AwaitActivity(workers_[0]->worker(), "0RG2");
  workers_[1].reset();
  const absl::Status lost = AwaitReady(Soon());
  EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(lost.message()), AllOf(HasSubstr("decoder stage 1 (worker "), HasSubstr("pid 101) is gone: its stream broke while step 7 ran"),
                                                 HasSubstr("decoder stage 0"), HasSubstr("was at 0RG2 on edge gradient.0")));
}

TEST_F(WorkerPoolTest, ANeighboursReportOfABrokenEdgeIsTheEffectOfTheOneThatLeft) {
  MakePool();
  Report(1, absl::StatusCode::kUnavailable, "the peer closed edge activation.0", "activation.0", 3);
  workers_[0].reset();
  const absl::Status lost = AwaitReady(Soon());
  EXPECT_THAT(std::string(lost.message()), testing::StartsWith("decoder stage 0"));
  EXPECT_THAT(std::string(lost.message()), AllOf(HasSubstr("is gone"), HasSubstr("decoder stage 1"),
                                                 HasSubstr("was at 1RA3 on edge activation.0, microbatch 3")));
}

TEST_F(WorkerPoolTest, AReportThatBlamesNoEdgeIsTheCause) {
  MakePool();
  Report(0, absl::StatusCode::kUnavailable, "edge activation.0 broke", "activation.0", 3);
  Report(1, absl::StatusCode::kInvalidArgument, "61 feature rows for 64 media positions", "", 3);
  const absl::Status failed = AwaitReady(Soon());
  EXPECT_EQ(failed.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("decoder stage 1"));
  EXPECT_THAT(std::string(failed.message()), HasSubstr("failed while step 7 ran: 61 feature rows for 64 media positions"));
}

TEST_F(WorkerPoolTest, AReporterThatLeavesAfterItsWordsIsJudgedByThem) {
  MakePool();
  Report(1, absl::StatusCode::kResourceExhausted, "out of memory", "", -1);
  workers_[1].reset();
  const absl::Status failed = AwaitReady(Soon());
  EXPECT_EQ(failed.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("out of memory"));
}

TEST(SilentWorkerTest, IsNamedWithWhatItDidLast) {
  // A stream without heartbeats: what a stopped process looks like.
  HubServer server;
  const auto stub = worker::v1::WorkerService::NewStub(MakeChannel(server.server->address()));
  grpc::ClientContext context;
  const auto stream = stub->Connect(&context);
  ConnectRequest event;
  *event.mutable_register_() = RegistrationOf(WORKER_ROLE_DECODER_STAGE, 1);
  ASSERT_TRUE(stream->Write(event));
  ConnectRequest heartbeat;
  heartbeat.mutable_heartbeat()->set_activity("1B2");
  ASSERT_TRUE(stream->Write(heartbeat));
  worker::v1::ConnectResponse answer;
  ASSERT_TRUE(stream->Read(&answer) && stream->Read(&answer));  // the welcome, the heartbeat's reply
  WorkerPool::Options options;
  options.heartbeat_timeout = absl::Milliseconds(50);
  options.gather = absl::Milliseconds(1);
  WorkerPool pool(&server.hub, server.hub.Workers(), options);
  const absl::Status silent = pool.Await("step 7 ran", Soon(), [] { return false; }, [] { return std::vector<uint32_t>(); });
  EXPECT_EQ(silent.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(silent.message()),
              AllOf(HasSubstr("decoder stage 1"), HasSubstr("has been silent for 50ms while step 7 ran; it was last at 1B2")));
  context.TryCancel();
}

}  // namespace
}  // namespace moonpipe
