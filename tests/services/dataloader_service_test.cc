#include "services/dataloader/dataloader_service.h"

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/metrics/registry.h"
#include "moonpipe/runtime/channel.h"
#include "moonpipe/runtime/rpc_error.h"
#include "moonpipe/runtime/server.h"

namespace moonpipe {
namespace {

using data::v1::FetchMicrobatchRequest;
using data::v1::FetchMicrobatchResponse;
using data::v1::MICROBATCH_VIEW_LABELS;
using data::v1::MICROBATCH_VIEW_PIXELS;
using data::v1::MICROBATCH_VIEW_TOKENS;
using data::v1::MICROBATCH_VIEW_UNSPECIFIED;
using data::v1::MicrobatchView;
using testing::HasSubstr;

constexpr uint64_t kGeneration = 4;

std::shared_ptr<const Step> StepOf(uint64_t number, size_t patch_bytes = 0) {
  auto step = std::make_shared<Step>();
  step->manifest.set_step(number);
  Microbatch microbatch;
  microbatch.token_ids = {1, 2, static_cast<int32_t>(number)};
  microbatch.labels = {2, -100, 3};
  microbatch.patches.resize(patch_bytes);
  std::iota(microbatch.patches.begin(), microbatch.patches.end(), uint8_t{0});
  microbatch.embeddings = {1.5F, -2.0F};
  step->microbatches = {microbatch, Microbatch()};
  return step;
}

worker::v1::Plan PlanOf(uint64_t generation) {
  worker::v1::Plan plan;
  plan.set_generation(generation);
  const auto grant = [&](uint32_t worker, const std::string& token, MicrobatchView view) {
    worker::v1::DataGrant& added = *plan.add_grants();
    added.set_worker(worker);
    added.set_access_token(token);
    added.add_views(view);
  };
  grant(1, "encoder", MICROBATCH_VIEW_PIXELS);
  grant(2, "first stage", MICROBATCH_VIEW_TOKENS);
  plan.mutable_grants(plan.grants_size() - 1)->add_views(data::v1::MICROBATCH_VIEW_EMBEDDINGS);
  grant(3, "last stage", MICROBATCH_VIEW_LABELS);
  return plan;
}

class DataloaderServiceTest : public testing::Test {
 protected:
  void SetUp() override {
    service_.SetPlan(PlanOf(kGeneration), DataloaderMetrics(&registry_, "digits"));
    auto started = GrpcServer::Start({}, {{&service_, data::v1::DataService::service_full_name()}});
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
    stub_ = data::v1::DataService::NewStub(MakeChannel(server_->address()));
  }

  static FetchMicrobatchRequest RequestOf(const std::string& token, MicrobatchView view, uint64_t step = 7, uint32_t microbatch = 0) {
    FetchMicrobatchRequest request;
    request.set_generation(kGeneration);
    request.set_access_token(token);
    request.set_step(step);
    request.set_microbatch(microbatch);
    request.set_view(view);
    return request;
  }

  // The bytes of all chunks; their sizes go to chunks_.
  absl::StatusOr<std::string> Fetch(const FetchMicrobatchRequest& request) {
    grpc::ClientContext context;
    SetDeadline(&context, absl::Seconds(60));
    const auto reader = stub_->FetchMicrobatch(&context, request);
    FetchMicrobatchResponse response;
    std::string bytes;
    chunks_.clear();
    totals_.clear();
    while (reader->Read(&response)) {
      bytes += response.chunk();
      chunks_.push_back(response.chunk().size());
      totals_.push_back(response.total_bytes());
    }
    const grpc::Status status = reader->Finish();
    if (!status.ok()) return FromGrpcStatus(status);
    return bytes;
  }
  std::string ReasonOf(const FetchMicrobatchRequest& request) {
    const absl::Status status = Fetch(request).status();
    const auto info = GetDetail<google::rpc::ErrorInfo>(status);
    EXPECT_EQ(info.has_value() ? info->domain() : "", kErrorDomain);
    return ErrorReason(status);
  }

  MetricsRegistry registry_;
  DataloaderService service_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<data::v1::DataService::Stub> stub_;
  std::vector<size_t> chunks_;
  std::vector<uint64_t> totals_;
};

std::string BytesOf(const std::vector<int32_t>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int32_t));
}

TEST_F(DataloaderServiceTest, ServesEachViewToTheWorkerWhosePlanNeedsIt) {
  service_.Hold(StepOf(7, 5));
  EXPECT_EQ(*Fetch(RequestOf("first stage", MICROBATCH_VIEW_TOKENS)), BytesOf({1, 2, 7}));
  EXPECT_EQ(*Fetch(RequestOf("last stage", MICROBATCH_VIEW_LABELS)), BytesOf({2, -100, 3}));
  EXPECT_EQ(*Fetch(RequestOf("encoder", MICROBATCH_VIEW_PIXELS)), std::string("\0\1\2\3\4", 5));
  const absl::StatusOr<std::string> embeddings = Fetch(RequestOf("first stage", data::v1::MICROBATCH_VIEW_EMBEDDINGS));
  const float expected[] = {1.5F, -2.0F};
  EXPECT_EQ(*embeddings, std::string(reinterpret_cast<const char*>(expected), sizeof(expected)));
}

TEST_F(DataloaderServiceTest, NobodyGetsAViewThatItsPlanDoesNotNeed) {
  service_.Hold(StepOf(7));
  const std::pair<const char*, MicrobatchView> own[] = {
      {"encoder", MICROBATCH_VIEW_PIXELS}, {"first stage", MICROBATCH_VIEW_TOKENS}, {"last stage", MICROBATCH_VIEW_LABELS}};
  for (const auto& [token, allowed] : own) {
    for (const MicrobatchView view : {MICROBATCH_VIEW_PIXELS, MICROBATCH_VIEW_TOKENS, MICROBATCH_VIEW_LABELS, MICROBATCH_VIEW_UNSPECIFIED}) {
      if (view == allowed) continue;
      const absl::Status denied = Fetch(RequestOf(token, view)).status();
      EXPECT_EQ(denied.code(), absl::StatusCode::kPermissionDenied) << token;
      EXPECT_EQ(ErrorReason(denied), "VIEW_NOT_GRANTED");
    }
  }
  EXPECT_THAT(std::string(Fetch(RequestOf("last stage", MICROBATCH_VIEW_PIXELS)).status().message()), HasSubstr("worker 3 may not fetch PIXELS"));
  EXPECT_EQ(ReasonOf(RequestOf("a stranger", MICROBATCH_VIEW_TOKENS)), "ACCESS_TOKEN_UNKNOWN");
  EXPECT_EQ(ReasonOf(RequestOf("", MICROBATCH_VIEW_TOKENS)), "ACCESS_TOKEN_UNKNOWN");
  EXPECT_THAT(registry_.Serialize(), HasSubstr("moonpipe_dataloader_denied_fetches_total{run=\"digits\"} 12"));
}

TEST_F(DataloaderServiceTest, ALargeViewComesInChunksOfAMebibyte) {
  const size_t bytes = (2 << 20) + 3;
  const auto step = StepOf(7, bytes);
  service_.Hold(step);
  const auto pixels = Fetch(RequestOf("encoder", MICROBATCH_VIEW_PIXELS));
  ASSERT_TRUE(pixels.ok()) << pixels.status();
  EXPECT_THAT(chunks_, testing::ElementsAre(1 << 20, 1 << 20, 3));
  EXPECT_THAT(totals_, testing::ElementsAre(bytes, 0, 0)) << "the first chunk tells how many bytes will come";
  const auto& patches = step->microbatches[0].patches;
  EXPECT_TRUE(std::equal(patches.begin(), patches.end(), pixels->begin(), pixels->end(),
                         [](uint8_t a, char b) { return a == static_cast<uint8_t>(b); }));
}

TEST_F(DataloaderServiceTest, AnEmptyViewIsOneEmptyChunk) {
  service_.Hold(StepOf(7));
  EXPECT_EQ(*Fetch(RequestOf("encoder", MICROBATCH_VIEW_PIXELS, 7, 1)), "");
  EXPECT_THAT(chunks_, testing::ElementsAre(0));
}

TEST_F(DataloaderServiceTest, AStaleGenerationIsAborted) {
  service_.Hold(StepOf(7));
  FetchMicrobatchRequest request = RequestOf("first stage", MICROBATCH_VIEW_TOKENS);
  request.set_generation(kGeneration - 1);
  const absl::Status stale = Fetch(request).status();
  EXPECT_EQ(stale.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ErrorReason(stale), "STALE_GENERATION");
  EXPECT_THAT(std::string(stale.message()), HasSubstr("stale generation 3: the dataloader serves generation 4"));
}

TEST_F(DataloaderServiceTest, WhatIsNotHeldIsNamed) {
  service_.Hold(StepOf(7));
  service_.Hold(StepOf(8));
  EXPECT_EQ(ReasonOf(RequestOf("first stage", MICROBATCH_VIEW_TOKENS, 9)), "STEP_NOT_HELD");
  const absl::Status range = Fetch(RequestOf("first stage", MICROBATCH_VIEW_TOKENS, 7, 2)).status();
  EXPECT_EQ(range.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(range.message()), HasSubstr("step 7 has 2 microbatches, microbatch 2 was asked for"));
  service_.DropBefore(8);
  EXPECT_EQ(ReasonOf(RequestOf("first stage", MICROBATCH_VIEW_TOKENS, 7)), "STEP_NOT_HELD");
  EXPECT_TRUE(Fetch(RequestOf("first stage", MICROBATCH_VIEW_TOKENS, 8)).ok());
  service_.Drop(8);
  EXPECT_EQ(ReasonOf(RequestOf("first stage", MICROBATCH_VIEW_TOKENS, 8)), "STEP_NOT_HELD");
}

TEST_F(DataloaderServiceTest, ANewPlanForgetsStepsAndTokens) {
  service_.Hold(StepOf(7));
  worker::v1::Plan plan;
  plan.set_generation(kGeneration);
  service_.SetPlan(plan);
  EXPECT_EQ(ReasonOf(RequestOf("first stage", MICROBATCH_VIEW_TOKENS)), "ACCESS_TOKEN_UNKNOWN");
  service_.SetPlan(PlanOf(kGeneration));
  EXPECT_EQ(ReasonOf(RequestOf("first stage", MICROBATCH_VIEW_TOKENS)), "STEP_NOT_HELD");
}

TEST_F(DataloaderServiceTest, CountsViewsBytesAndStepsThatWait) {
  service_.Hold(StepOf(7));
  service_.Hold(StepOf(8));
  EXPECT_THAT(registry_.Serialize(), HasSubstr("moonpipe_dataloader_prefetched_steps{run=\"digits\"} 2"));
  ASSERT_TRUE(Fetch(RequestOf("first stage", MICROBATCH_VIEW_TOKENS, 7)).ok());
  const std::string page = registry_.Serialize();
  EXPECT_THAT(page, HasSubstr("moonpipe_dataloader_prefetched_steps{run=\"digits\"} 1"));
  EXPECT_THAT(page, HasSubstr("moonpipe_dataloader_views_total{run=\"digits\",view=\"tokens\"} 1"));
  EXPECT_THAT(page, HasSubstr("moonpipe_dataloader_view_bytes_total{run=\"digits\",view=\"tokens\"} 12"));
}

}  // namespace
}  // namespace moonpipe
