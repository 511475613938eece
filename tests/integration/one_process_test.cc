// The whole cluster within one process: the same servers, streams and edges, each service on a thread of its own. What sanitizers and
// debuggers are pointed at, and a proof that no service leans on being alone in its process.
#include <filesystem>
#include <functional>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cli/control_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/runtime/compute_worker.h"
#include "moonpipe/runtime/worker_process.h"
#include "services/coordinator/coordinator.h"
#include "services/dataloader/dataloader_service.h"
#include "services/dataloader/dataloader_worker.h"
#include "tests/integration/tiny.h"
#include "tests/testing/tiny_config.h"

namespace moonpipe {
namespace {

using common::v1::WorkerRole;

ServiceFlags Loopback() {
  ServiceFlags flags;
  flags.listen = flags.metrics_listen = "127.0.0.1:0";
  return flags;
}

// One service: a thread that registers, serves until it is drained, and keeps its result.
class Service {
 public:
  Service(WorkerRole role, uint32_t ordinal, const std::string& coordinator, const std::string& socket_folder) {
    thread_ = std::thread([=, this] {
      WorkerProcess::Options options;
      options.role = role;
      options.ordinal = ordinal;
      options.flags = Loopback();
      options.flags.coordinator = coordinator;
      options.boot_id = "one-process";
      result_ = role == common::v1::WORKER_ROLE_DATALOADER ? ServeData(options) : Compute(options, socket_folder);
    });
  }
  ~Service() { thread_.join(); }
  // After the coordinator has drained it.
  absl::Status Join() {
    thread_.join();
    thread_ = std::thread([] {});
    return result_;
  }

 private:
  static absl::Status ServeData(const WorkerProcess::Options& options) {
    DataloaderService service;
    MOONPIPE_ASSIGN_OR_RETURN(const auto process,
                              WorkerProcess::Start(options, {{&service, data::v1::DataService::service_full_name()}}));
    return ServeDataloader(&process->client(), &service, &process->registry());
  }
  static absl::Status Compute(const WorkerProcess::Options& options, const std::string& socket_folder) {
    MOONPIPE_ASSIGN_OR_RETURN(const auto process, WorkerProcess::Start(options, {}));
    ComputeWorkerOptions worker;
    worker.client = &process->client();
    worker.metrics = &process->registry();
    worker.socket_folder = socket_folder;
    worker.boot_id = options.boot_id;
    return ServeComputeWorker(worker);
  }

  absl::Status result_;
  std::thread thread_;
};

cluster::v1::TrainingRunSpec ReadSpec(const TinyRun& run) {
  const auto spec = LoadRunFile(run.run_file);
  EXPECT_TRUE(spec.ok()) << spec.status();
  return *spec;
}

TEST(OneProcessTest, AClusterOfThreadsTrainsAndSavesTheBytesOfAClusterOfProcesses) {
  const TinyRun tiny = WriteTinyRun("one-process", TinyConfig());
  const std::string runs = tiny.folder + "/threads";
  const auto coordinator = Coordinator::Start(Loopback(), runs);
  ASSERT_TRUE(coordinator.ok()) << coordinator.status();
  const std::string address = (*coordinator)->address();
  const std::string sockets = FreshFolder("sockets");
  std::vector<std::unique_ptr<Service>> services;
  services.push_back(std::make_unique<Service>(common::v1::WORKER_ROLE_DATALOADER, 0, address, sockets));
  services.push_back(std::make_unique<Service>(common::v1::WORKER_ROLE_VISION_ENCODER, 0, address, sockets));
  for (uint32_t stage = 0; stage < 2; ++stage) {
    services.push_back(std::make_unique<Service>(common::v1::WORKER_ROLE_DECODER_STAGE, stage, address, sockets));
  }

  ControlClient client(address);
  cluster::v1::CreateTrainingRunRequest request;
  request.set_training_run_id("threads");
  *request.mutable_spec() = ReadSpec(tiny);
  const auto created = client.Create(request);
  ASSERT_TRUE(created.ok()) << created.status();
  std::vector<double> losses;
  const absl::Status watched = client.Watch(created->name(), 0, [&](const cluster::v1::WatchTrainingRunResponse& event) {
    if (event.has_step()) losses.push_back(event.step().loss());
    return true;
  });
  EXPECT_TRUE(watched.ok()) << watched;
  const auto ended = client.Get(created->name());
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(ended->state(), cluster::v1::TrainingRun::STATE_SUCCEEDED) << ended->error();
  (*coordinator)->Stop();
  for (const auto& service : services) EXPECT_EQ(service->Join(), absl::OkStatus());

  std::vector<std::string> curves;
  for (const auto& entry : std::filesystem::directory_iterator(ended->folder() + "/tensorboard")) curves.push_back(entry.path().filename());
  EXPECT_THAT(curves, testing::ElementsAre(testing::StartsWith("events.out.tfevents.")));

  const TrainResult processes = RunTrain(tiny, "processes", {});
  ASSERT_EQ(processes.exit_code, 0) << processes.err;
  ASSERT_EQ(losses.size(), processes.metrics.size());
  for (size_t step = 0; step < losses.size(); ++step) EXPECT_EQ(losses[step], processes.metrics[step]["loss"]) << "step " << step + 1;
  const auto weights = ReadTensors(NewestCheckpoint(ended->folder()), "model");
  EXPECT_GT(weights.size(), 100U);
  EXPECT_EQ(weights, ReadTensors(NewestCheckpoint(processes.run_folder), "model"));
}

}  // namespace
}  // namespace moonpipe

int main(int argc, char** argv) {
  // As the services do: without it a matrix product's bits depend on where its memory lies.
  moonpipe::SetEnvironmentForDeterminism(argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
