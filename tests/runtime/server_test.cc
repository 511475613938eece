#include "moonpipe/runtime/server.h"

#include <atomic>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "moonpipe/base/listen_address.h"
#include "moonpipe/cluster/v1/cluster_service.grpc.pb.h"
#include "moonpipe/runtime/channel.h"
#include "moonpipe/runtime/rpc_error.h"

namespace moonpipe {
namespace {

using cluster::v1::ClusterService;
using testing::HasSubstr;

// Answers Get with what the name asks for: `ok`, `long` (as much as the limit of a message), `wait` (until cancelled)
// or an error.
class ScriptedService : public ClusterService::CallbackService {
 public:
  grpc::ServerUnaryReactor* GetTrainingRun(grpc::CallbackServerContext* context,
                                           const cluster::v1::GetTrainingRunRequest* request,
                                           cluster::v1::TrainingRun* response) override {
    if (request->name() == "wait") {
      class Waiting : public grpc::ServerUnaryReactor {
       public:
        explicit Waiting(absl::Notification* entered) { entered->Notify(); }
        void OnCancel() override { Finish(grpc::Status(grpc::StatusCode::CANCELLED, "server goes down")); }
        void OnDone() override { delete this; }
      };
      return new Waiting(&entered);
    }
    auto* reactor = context->DefaultReactor();
    if (request->name() == "ok") {
      response->set_name("trainingRuns/ok");
      reactor->Finish(grpc::Status::OK);
    } else if (request->name() == "long") {
      response->set_error(std::string(4 << 20, 'x'));
      reactor->Finish(grpc::Status::OK);
    } else {
      reactor->Finish(ToGrpcStatus(
          RpcError(absl::StatusCode::kNotFound, "no such run", "RUN_NOT_FOUND", {{"run", request->name()}})));
    }
    return reactor;
  }

  absl::Notification entered;
};

class Server : public testing::Test {
 protected:
  void Start(ServerOptions options = {}) {
    options.on_rpc = [this](const FinishedRpc& rpc) {
      absl::MutexLock lock(&mutex_);
      finished_.push_back(absl::StrCat(rpc.service, "/", rpc.method, " ", rpc.code));
      EXPECT_GE(rpc.duration, absl::ZeroDuration());
    };
    auto server = GrpcServer::Start(options, {{&service_, ClusterService::service_full_name()}});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
  }

  absl::Status Get(const std::string& name, const ChannelOptions& options = {}, const std::string& padding = "") {
    const auto stub = ClusterService::NewStub(MakeChannel(server_->address(), options));
    grpc::ClientContext context;
    SetDeadline(&context, absl::Seconds(10));
    cluster::v1::GetTrainingRunRequest request;
    request.set_name(name + padding);
    cluster::v1::TrainingRun response;
    return FromGrpcStatus(stub->GetTrainingRun(&context, request, &response));
  }

  // Health by the bytes of grpc.health.v1: request {1: service}, answer {1: status}, where 1 is SERVING and 2
  // NOT_SERVING.
  static std::string Health(const std::string& address, const std::string& service) {
    grpc::GenericStub stub(MakeChannel(address, {.own_connection = true}));
    grpc::ClientContext context;
    SetDeadline(&context, absl::Seconds(10));
    const std::string request =
        service.empty() ? "" : absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
    grpc::Slice slice(request);
    grpc::ByteBuffer send(&slice, 1), receive;
    absl::Notification done;
    grpc::Status status;
    stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &send, &receive, [&](grpc::Status s) {
      status = std::move(s);
      done.Notify();
    });
    done.WaitForNotification();
    if (!status.ok()) return absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
    grpc::Slice answer;
    EXPECT_TRUE(receive.DumpToSingleSlice(&answer).ok());
    const std::string bytes(reinterpret_cast<const char*>(answer.begin()), answer.size());
    return bytes == "\x08\x01" ? "SERVING" : bytes == "\x08\x02" ? "NOT_SERVING" : "unexpected bytes";
  }

  std::vector<std::string> Finished(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&] { return finished_.size() >= count; };
    mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(10));
    return finished_;
  }

  ScriptedService service_;
  absl::Mutex mutex_;
  std::vector<std::string> finished_;
  std::unique_ptr<GrpcServer> server_;
};

TEST_F(Server, AnswersWithErrorsThatKeepTheirDetails) {
  Start();
  EXPECT_TRUE(Get("ok").ok());
  const absl::Status status = Get("other");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorReason(status), "RUN_NOT_FOUND");
  EXPECT_EQ(GetDetail<google::rpc::ErrorInfo>(status)->metadata().at("run"), "other");
}

TEST_F(Server, ReportsEveryCallOnce) {
  Start();
  EXPECT_TRUE(Get("ok").ok());
  EXPECT_FALSE(Get("other").ok());
  EXPECT_THAT(Finished(2), testing::ElementsAre("moonpipe.cluster.v1.ClusterService/GetTrainingRun OK",
                                                "moonpipe.cluster.v1.ClusterService/GetTrainingRun NOT_FOUND"));
}

TEST_F(Server, HealthFollowsReadiness) {
  Start({.health_listen = "127.0.0.1:0"});
  const std::vector<std::string> readiness = {"", "readiness", ClusterService::service_full_name()};
  for (const std::string& address : {server_->address(), server_->health_address()}) {
    EXPECT_EQ(Health(address, "liveness"), "SERVING");
    EXPECT_EQ(Health(address, "unknown"), "NOT_FOUND");
    for (const auto& name : readiness) EXPECT_EQ(Health(address, name), "NOT_SERVING") << name;
  }
  server_->SetReady(true);
  for (const std::string& address : {server_->address(), server_->health_address()}) {
    for (const auto& name : readiness) EXPECT_EQ(Health(address, name), "SERVING") << name;
  }
}

TEST_F(Server, TheHealthPortServesHealthAlone) {
  Start({.health_listen = "127.0.0.1:0"});
  const auto stub = ClusterService::NewStub(MakeChannel(server_->health_address()));
  grpc::ClientContext context;
  SetDeadline(&context, absl::Seconds(10));
  cluster::v1::TrainingRun response;
  EXPECT_EQ(stub->GetTrainingRun(&context, {}, &response).error_code(), grpc::StatusCode::UNIMPLEMENTED);
  for (const std::string& address : {server_->address(), server_->health_address()}) {
    grpc::GenericStub generic(MakeChannel(address));
    grpc::ClientContext call;
    SetDeadline(&call, absl::Seconds(10));
    // ServerReflectionRequest {7: list_services = ""}; a unary call to a streaming method sends one request and reads
    // one answer.
    grpc::Slice slice(std::string("\x3a\x00", 2));
    grpc::ByteBuffer send(&slice, 1), receive;
    absl::Notification done;
    grpc::Status status;
    generic.UnaryCall(&call, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", grpc::StubOptions(),
                      &send, &receive, [&](grpc::Status s) {
                        status = std::move(s);
                        done.Notify();
                      });
    done.WaitForNotification();
    if (address == server_->health_address()) {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    } else {
      ASSERT_TRUE(status.ok()) << status.error_message();
      grpc::Slice answer;
      ASSERT_TRUE(receive.DumpToSingleSlice(&answer).ok());
      EXPECT_THAT(std::string(reinterpret_cast<const char*>(answer.begin()), answer.size()),
                  HasSubstr("moonpipe.cluster.v1.ClusterService"));
    }
  }
}

TEST_F(Server, APortInUseNamesAddressReasonAndFlag) {
  Start();
  const auto second = GrpcServer::Start({.listen = server_->address()}, {});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(),
              HasSubstr(server_->address() + ": Address already in use; choose another with --listen"));
  const auto health = GrpcServer::Start({.health_listen = server_->address()}, {});
  EXPECT_EQ(health.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(health.status().message(), HasSubstr("choose another with --health-listen"));
}

TEST(ServerAddress, MustBeAnAddressOfThisMachine) {
  const auto server = GrpcServer::Start({.listen = "192.0.2.1:0", .insecure = true}, {});
  EXPECT_EQ(server.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(server.status().message(), HasSubstr("Cannot assign requested address"));
  EXPECT_EQ(GrpcServer::Start({.listen = "nonsense"}, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ServerAddress, BeyondLoopbackNeedsToBeAskedFor) {
  const auto refused = GrpcServer::Start({.listen = "0.0.0.0:0"}, {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("--insecure"));
  EXPECT_EQ(GrpcServer::Start({.health_listen = "0.0.0.0:0"}, {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(GrpcServer::Start({.listen = "0.0.0.0:0", .insecure = true}, {}).ok());
  // With credentials there is no plain text to refuse.
  EXPECT_TRUE(GrpcServer::Start({.listen = "0.0.0.0:0", .credentials = grpc::InsecureServerCredentials()}, {}).ok());
}

TEST_F(Server, LimitsWhatItReceives) {
  Start({.max_receive_bytes = 1000});
  EXPECT_EQ(Get("other", {}, std::string(500, 'x')).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Get("other", {}, std::string(1000, 'x')).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(Server, AClientLimitsWhatItReceives) {
  Start();
  EXPECT_EQ(Get("long").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Get("long", {.max_receive_bytes = 5 << 20}).ok());
}

TEST_F(Server, ShutdownCancelsACallThatDoesNotEnd) {
  Start();
  const auto channel = MakeChannel(server_->address());
  const auto stub = ClusterService::NewStub(channel);
  grpc::ClientContext context;
  SetDeadline(&context, absl::Seconds(30));
  cluster::v1::GetTrainingRunRequest request;
  request.set_name("wait");
  cluster::v1::TrainingRun response;
  absl::Notification done;
  grpc::Status status;
  stub->async()->GetTrainingRun(&context, &request, &response, [&](grpc::Status s) {
    status = std::move(s);
    done.Notify();
  });
  service_.entered.WaitForNotification();
  server_->Shutdown(absl::Milliseconds(10));
  done.WaitForNotification();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  // The port is free again.
  EXPECT_TRUE(GrpcServer::Start({.listen = server_->address()}, {}).ok());
  EXPECT_THAT(Finished(1), testing::ElementsAre("moonpipe.cluster.v1.ClusterService/GetTrainingRun CANCELLED"));
}

TEST_F(Server, AnAbsentPeerIsNamed) {
  Start();
  const std::string address = server_->address();
  EXPECT_TRUE(WaitForConnection(MakeChannel(address).get(), "coordinator", address, absl::Seconds(10)).ok());
  server_->Shutdown(absl::ZeroDuration());
  const absl::Status status =
      WaitForConnection(MakeChannel(address).get(), "coordinator", address, absl::Milliseconds(50));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("cannot reach the coordinator at ", address, " within 50ms")));
}

}  // namespace
}  // namespace moonpipe
