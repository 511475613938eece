// What a person or another machine can get wrong, through the program or the service that must notice it.
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/runtime/channel.h"
#include "moonpipe/runtime/coordinator_client.h"
#include "moonpipe/runtime/server.h"
#include "services/coordinator/worker_hub.h"
#include "services/dataloader/dataloader_service.h"
#include "tests/data/testing_files.h"
#include "tests/faults/faulty_run.h"

namespace moonpipe {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// Trains and expects a refusal; returns its message.
std::string Refusal(const std::string& run_file, std::vector<std::string> more = {}) {
  const std::string run_folder = fs::path(run_file).parent_path().string() + "/the-run";
  const auto program = Program::Moonpipe(Train(run_file, run_folder, std::move(more)));
  EXPECT_EQ(program->Wait().ToString(), "exited with code 1") << program->out() << program->err();
  EXPECT_TRUE(AllGone(run_folder));
  EXPECT_TRUE(CheckpointsOf(run_folder).empty());
  EXPECT_TRUE(MetricsOf(run_folder).empty()) << "a step was taken";
  return program->err();
}

std::string RefusalOfConfig(const std::string& name, const nlohmann::json& config) {
  return Refusal(WriteRun(FreshFolder(name), config));
}

// Trains to the end.
void TrainWell(const std::string& run_file, const std::string& run_folder, std::vector<std::string> more = {}) {
  const auto program = Program::Moonpipe(Train(run_file, run_folder, std::move(more)));
  ASSERT_EQ(program->Wait().ToString(), "exited with code 0") << program->err() << LogOf(run_folder, "coordinator");
}

TEST(BadRunFileTest, AMisspeltFieldNamesTheNearest) {
  const std::string run_file = WriteRun(FreshFolder("misspelt"), TinyConfig(), "runtime: {compute_thread: 1}\n");
  EXPECT_THAT(Refusal(run_file), AllOf(HasSubstr("compute_thread"), HasSubstr("did you mean"), HasSubstr("compute_threads")));
}

TEST(BadRunFileTest, AFolderThatCannotBeARunsIdIsRefusedWithOneThatCan) {
  const auto program = Program::Moonpipe({"train", WriteRun(FreshFolder("folder")), "--run-folder", "/nowhere/My_Run"});
  EXPECT_EQ(program->Wait().exit_code, 1);
  EXPECT_THAT(program->err(), AllOf(HasSubstr("--run-folder /nowhere/My_Run"), HasSubstr("such as my-run")));
}

TEST(BadRunFileTest, AMissingShardOfDataIsNamed) {
  const std::string run_file = WriteRun(FreshFolder("no-data"));
  EXPECT_THAT(Refusal(run_file, {"--set", "data.train=/nowhere/train-000009.tar"}), HasSubstr("/nowhere/train-000009.tar"));
}

TEST(BadModelTest, AMissingFieldHasNoDefault) {
  nlohmann::json config = TinyConfig();
  config["text_config"].erase("kv_lora_rank");
  EXPECT_THAT(RefusalOfConfig("missing-field", config), HasSubstr("kv_lora_rank"));
}

TEST(BadModelTest, AnOptionThatIsNotSupportedIsRefusedWithItsReason) {
  nlohmann::json config = TinyConfig();
  config["text_config"]["scoring_func"] = "softmax";
  EXPECT_THAT(RefusalOfConfig("option", config), AllOf(HasSubstr("scoring_func"), HasSubstr("softmax"), HasSubstr("is not supported")));
}

TEST(BadModelTest, JsonWithCommentsTellsLineAndColumn) {
  const std::string folder = FreshFolder("comments");
  const std::string run_file = WriteRun(folder);
  const auto text = ReadFile(folder + "/config.json");
  ASSERT_TRUE(text.ok());
  std::ofstream(folder + "/config.json") << "{\n  // a comment\n" << text->substr(2);
  EXPECT_THAT(Refusal(run_file), AllOf(HasSubstr("config.json"), ContainsRegex("line 2"), ContainsRegex("column 3")));
}

TEST(BadModelTest, AVocabularySmallerThanTheTokenizersIsRefused) {
  nlohmann::json config = TinyConfig();
  config["text_config"]["vocab_size"] = 422;
  // The tokenizer has one more, that the model itself never uses.
  config["pad_token_id"] = config["text_config"]["pad_token_id"] = 0;
  EXPECT_THAT(RefusalOfConfig("vocabulary", config), AllOf(HasSubstr("422"), HasSubstr("423"), HasSubstr("vocab"), HasSubstr("tokenizer")));
}

TEST(BadModelTest, APlaceholderThatIsNotTheTokenizersIsRefused) {
  nlohmann::json config = TinyConfig();
  config["media_placeholder_token_id"] = 420;
  EXPECT_THAT(RefusalOfConfig("placeholder", config), AllOf(HasSubstr("420"), HasSubstr("421")));
}

TEST(BadModelTest, AMissingShardOfWeightsIsNamed) {
  const std::string folder = FreshFolder("no-shard");
  TrainWell(WriteRun(folder), folder + "/first", {"--set", "train.steps=1", "--set", "optimizer.schedule.warmup_steps=0"});
  const std::string shard = "model-00002-of-00003.safetensors";
  fs::copy(CheckpointOf(folder + "/first", 1), folder + "/model");
  ASSERT_TRUE(fs::remove(folder + "/model/" + shard));
  const std::string other = FreshFolder("no-shard-run");
  const std::string run_file = WriteRun(other);
  const auto text = ReadFile(run_file);
  ASSERT_TRUE(text.ok());
  std::ofstream(run_file) << absl::StrReplaceAll(*text, {{"{config: config.json}", absl::StrCat("{path: ", folder, "/model}")}});
  EXPECT_THAT(Refusal(run_file), HasSubstr(shard));
}

TEST(UnevenLayersTest, FiveLayersAreSplitOverTwoAndThreeStages) {
  nlohmann::json config = TinyConfig();
  config["text_config"]["num_hidden_layers"] = 5;
  for (const int stages : {2, 3}) {
    const std::string folder = FreshFolder(absl::StrCat("uneven-", stages));
    const auto program =
        Program::Moonpipe(Train(WriteRun(folder, config), folder + "/the-run",
                                {"--set", "train.steps=1", "--set", "optimizer.schedule.warmup_steps=0", "--set",
                                 absl::StrCat("pipeline.stages=", stages)}));
    ASSERT_EQ(program->Wait().ToString(), "exited with code 0") << program->err();
    std::string shown;
    for (const auto line : absl::StrSplit(program->out(), '\n')) {
      if (absl::StrContains(line, "layer")) absl::StrAppend(&shown, line, "\n");
    }
    // Every layer has a place, in the plan and in the checkpoint.
    EXPECT_THAT(shown, AllOf(ContainsRegex("layers 0-[12]"), ContainsRegex("(layer 4|-4)")));
    const auto tensors = TensorsOf(CheckpointOf(folder + "/the-run", 1));
    for (int layer = 0; layer < 5; ++layer) {
      EXPECT_TRUE(tensors.contains(absl::StrCat("language_model.model.layers.", layer, ".input_layernorm.weight"))) << layer;
    }
  }
}

// A run on a data set of the given members.
std::string WriteRunOn(const std::string& folder, const TarMembers& members) {
  const std::string run_file = WriteRun(folder);
  const auto text = ReadFile(run_file);
  EXPECT_TRUE(text.ok());
  const std::string tar = WriteTar(folder + "/samples.tar", members);
  std::ofstream(run_file) << absl::StrReplaceAll(*text, {{SOURCE_DIR "/examples/digits/train-000000.tar", tar}});
  return run_file;
}

TEST(BadSamplesTest, DamagedPicturesAndLongSamplesAreSkippedCountedAndNamed) {
  const std::string folder = FreshFolder("damaged");
  const std::string png = PngOf(28, 28, 9, 9, 9);
  TarMembers members;
  const auto add = [&](const std::string& key, const std::string& question, const std::string& picture) {
    members.emplace_back(key + ".json", RecordJson(question, "x", {key + ".png"}));
    members.emplace_back(key + ".png", picture);
  };
  for (const char* key : {"good-0", "good-1", "good-2"}) add(key, "<image>?", png);
  add("cut", "<image>?", png.substr(0, png.size() / 2));
  add("empty", "<image>?", "");
  add("text", "<image>?", "this is no picture");
  add("long", absl::StrCat("<image>", std::string(600, 'a')), png);
  const std::string run_file = WriteRunOn(folder, members);
  const std::string run_folder = folder + "/the-run";
  const auto program = Program::Moonpipe(Train(run_file, run_folder, {"--set", "train.steps=2", "--set", "pipeline.microbatches=1"}),
                                         "coordinator:before_journal@2=hold");
  ASSERT_TRUE(AwaitFault(run_folder, *program)) << program->err();
  EXPECT_EQ(program->Wait().ToString(), "exited with code 0") << program->err();
  const std::string log = LogOf(run_folder, "coordinator");
  for (const char* key : {"cut", "empty", "text"}) {
    EXPECT_THAT(log, ContainsRegex(absl::StrCat("skipped sample [0-9]+ \\([^)]*", key, "\\): bad_picture"))) << key;
  }
  EXPECT_THAT(log, ContainsRegex("skipped sample [0-9]+ \\([^)]*long\\): too_long"));
  EXPECT_THAT(log, testing::Not(ContainsRegex("skipped sample [0-9]+ \\([^)]*good")));
  for (const auto& line : MetricsOf(run_folder)) EXPECT_GE(line.at("samples"), 3) << line;
}

TEST(BadSamplesTest, ASetWithoutAnyGoodSampleEndsTheRun) {
  const std::string folder = FreshFolder("all-bad");
  TarMembers members;
  for (const char* key : {"a", "b", "c"}) {
    members.emplace_back(absl::StrCat(key, ".json"), RecordJson("<image>?", "x", {absl::StrCat(key, ".png")}));
    members.emplace_back(absl::StrCat(key, ".png"), "no picture");
  }
  EXPECT_THAT(Refusal(WriteRunOn(folder, members)), AllOf(HasSubstr("step 1"), HasSubstr("none of the 3 samples can be used"), HasSubstr("3 bad_picture")));
}

TEST(MessageLimitTest, AStepWithALargerMessageIsRefusedBeforeItRuns) {
  const std::string folder = FreshFolder("limit");
  // 256 tokens of 48 floats are 49,152 bytes at most.
  const std::string message = Refusal(WriteRun(folder), {"--set", "runtime.max_edge_message_bytes=20000"});
  EXPECT_THAT(message, AllOf(HasSubstr("step 1 microbatch"), ContainsRegex("edge (activation.0|features)"),
                             ContainsRegex("in [0-9]+ bytes, the limit is 20000"), HasSubstr("runtime.max_edge_message_bytes")));
  const auto journal = ReadFile(folder + "/the-run/journal.jsonl");
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ(*journal, "") << "a step counts";
}

TEST(PortInUseTest, ASecondCoordinatorOnOnePortSaysSo) {
  const std::string folder = FreshFolder("port");
  const std::string address_file = folder + "/address";
  const auto first = Program::Run("moonpipe-coordinator", {"--runs-folder", folder, "--address-file", address_file});
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  absl::StatusOr<std::string> address;
  while (!(address = ReadFile(address_file)).ok() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(10));
  ASSERT_TRUE(address.ok()) << first->err();
  const std::string listen(absl::StripAsciiWhitespace(*address));
  const auto second = Program::Run("moonpipe-coordinator", {"--runs-folder", folder, "--listen", listen});
  EXPECT_EQ(second->Wait().ToString(), "exited with code 1");
  EXPECT_THAT(second->err(), AllOf(HasSubstr(listen), HasSubstr("--listen"), HasSubstr("use")));
  first->Signal(SIGTERM);
  EXPECT_EQ(first->Wait().ToString(), "exited with code 0") << first->err();
}

// A coordinator's end of the workers' streams, served in this process.
class StrangeWorkerTest : public testing::Test {
 protected:
  StrangeWorkerTest() : hub_({.proto_digest = "the-digest-of-here"}) {
    auto server = GrpcServer::Start({}, {{&hub_, worker::v1::WorkerService::service_full_name()}});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  ~StrangeWorkerTest() override {
    hub_.Shutdown();
    server_->Shutdown(absl::Seconds(1));
  }

  absl::StatusOr<std::unique_ptr<CoordinatorClient>> Connect(const std::string& digest, uint32_t ordinal) {
    CoordinatorClient::Options options;
    options.channel = MakeChannel(server_->address());
    options.registration.set_role(common::v1::WORKER_ROLE_DECODER_STAGE);
    options.registration.set_ordinal(ordinal);
    options.registration.set_proto_digest(digest);
    options.connect_timeout = absl::Seconds(20);
    return CoordinatorClient::Connect(std::move(options));
  }

  WorkerHub hub_;
  std::unique_ptr<GrpcServer> server_;
};

TEST_F(StrangeWorkerTest, AWorkerBuiltFromOtherProtosIsRefused) {
  const auto refused = Connect("another-digest-altogether", 0);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("decoder stage 0 was built from other protos"), HasSubstr("another-dige"), HasSubstr("the-digest-o")));
  EXPECT_TRUE(hub_.Workers().empty());
}

TEST_F(StrangeWorkerTest, APlaceThatIsTakenIsRefusedAndTheFirstWorkerStays) {
  const auto first = Connect("the-digest-of-here", 1);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = Connect("the-digest-of-here", 1);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("decoder stage 1"));
  EXPECT_EQ(hub_.Workers().size(), 1u);
  const auto third = Connect("the-digest-of-here", 0);
  EXPECT_TRUE(third.ok()) << third.status();
}

TEST_F(StrangeWorkerTest, KeysOfAnOlderPlanReachNobody) {
  const auto first = Connect("the-digest-of-here", 0);
  const auto second = Connect("the-digest-of-here", 1);
  ASSERT_TRUE(first.ok() && second.ok());
  hub_.BeginGeneration(5);
  const auto stale = (*first)->MakeRendezvous(4);
  const auto fresh = (*first)->MakeRendezvous(5);
  ASSERT_TRUE(stale->Set("edge", "stale").ok());
  ASSERT_TRUE(fresh->Set("edge", "fresh").ok());
  const auto value = (*second)->MakeRendezvous(5)->Get("edge", absl::Now() + absl::Seconds(20));
  ASSERT_TRUE(value.ok()) << value.status();
  EXPECT_EQ(*value, "fresh");
}

TEST(StaleGenerationTest, ViewsOfAnOlderPlanAreRefusedWithBothGenerations) {
  DataloaderService service;
  worker::v1::Plan plan;
  plan.set_generation(2);
  worker::v1::DataGrant& grant = *plan.add_grants();
  grant.set_worker(3);
  grant.set_access_token("token");
  grant.add_views(data::v1::MICROBATCH_VIEW_TOKENS);
  service.SetPlan(plan);
  auto step = std::make_shared<Step>();
  step->manifest.set_step(1);
  step->microbatches.resize(1);
  step->microbatches[0].token_ids = {1, 2, 3};
  service.Hold(step);
  data::v1::FetchMicrobatchRequest request;
  request.set_generation(2);
  request.set_access_token("token");
  request.set_step(1);
  request.set_view(data::v1::MICROBATCH_VIEW_TOKENS);
  const auto now = service.Find(request);
  ASSERT_TRUE(now.ok()) << now.status();
  EXPECT_EQ(now->bytes, 12u);
  request.set_generation(1);
  const auto stale = service.Find(request);
  EXPECT_EQ(stale.status().code(), absl::StatusCode::kAborted) << stale.status();
  EXPECT_THAT(std::string(stale.status().message()), AllOf(HasSubstr("stale generation 1"), HasSubstr("generation 2")));
  request.set_generation(2);
  request.set_view(data::v1::MICROBATCH_VIEW_PIXELS);
  EXPECT_EQ(service.Find(request).status().code(), absl::StatusCode::kPermissionDenied);
}

}  // namespace
}  // namespace moonpipe
