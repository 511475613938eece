#include "services/dataloader/dataloader_worker.h"

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "moonpipe/base/fault_point.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/data/batch_source.h"
#include "moonpipe/data/preprocessor_config.h"
#include "moonpipe/data/step_source.h"
#include "moonpipe/metrics/role_metrics.h"
#include "moonpipe/spec/model_config.h"

namespace moonpipe {

using worker::v1::ConnectRequest;
using worker::v1::ConnectResponse;
using worker::v1::Plan;
using worker::v1::PrepareStep;
using worker::v1::PublishManifest;

namespace {

class DataPlan {
 public:
  DataPlan(Plan plan, DataloaderService* service) : plan_(std::move(plan)), service_(service), cursor_(plan_.cursor()) {}

  absl::Status Start(const DataloaderMetrics& metrics) {
    MOONPIPE_ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(plan_.model_config_json()));
    const auto& spec = plan_.spec();
    if (spec.data().has_batches()) {
      const BatchSourceOptions batch{spec.data().batches(), spec.data().batch_case(), static_cast<int32_t>(spec.pipeline().microbatches())};
      MOONPIPE_ASSIGN_OR_RETURN(source_, OpenBatchSource(batch, config));
      return Serve(metrics);
    }
    options_.files.assign(spec.data().train().begin(), spec.data().train().end());
    options_.tokenizer_folder = spec.data().tokenizer();
    options_.chat_template = spec.data().chat_template();
    options_.vocab_size = config.text.vocab_size;
    options_.media_placeholder_token_id = config.media_placeholder_token_id;
    options_.ignore_index = config.ignore_index;
    options_.microbatches = static_cast<int32_t>(spec.pipeline().microbatches());
    options_.microbatch_tokens = static_cast<int32_t>(spec.pipeline().microbatch_tokens());
    options_.packing_window = static_cast<int32_t>(spec.data().packing_window());
    const auto limit = spec.data().has_max_patches() ? std::optional(spec.data().max_patches()) : std::nullopt;
    MOONPIPE_ASSIGN_OR_RETURN(options_.pictures, ResolvePictureRule(config, PreprocessorFolders(spec), limit));
    options_.seed = spec.train().seed();
    options_.random_warp.shift_pixels = spec.data().random_shift_pixels();
    options_.random_warp.rotation_degrees = spec.data().random_rotation_degrees();
    options_.random_warp.scale = spec.data().random_scale();
    options_.allow_outside_paths = spec.data().allow_outside_paths();
    MOONPIPE_ASSIGN_OR_RETURN(source_, OpenStepSource(options_));
    return Serve(metrics);
  }

  // A manifest, or one that bears the error: a step that cannot be made is the coordinator's to judge.
  PublishManifest Prepare(const PrepareStep& request) {
    PublishManifest published;
    published.set_generation(plan_.generation());
    absl::Status made = request.has_decode() ? PrepareDecode(request, published) : PrepareTraining(request, published);
    published.mutable_manifest()->set_step(request.step());
    if (!made.ok()) published.set_error(std::string(made.message()));
    return published;
  }

  const Plan& plan() const { return plan_; }

 private:
  absl::Status Serve(const DataloaderMetrics& metrics) {
    service_->SetPlan(plan_, metrics);
    next_step_ = plan_.initial_state().step() + 1;
    return absl::OkStatus();
  }

  absl::Status PrepareTraining(const PrepareStep& request, PublishManifest& published) {
    if (request.step() != next_step_) {
      return absl::FailedPreconditionError(
          absl::StrCat("steps are made in order: step ", next_step_, " is next, step ", request.step(), " was asked for"));
    }
    MOONPIPE_RETURN_IF_ERROR(FaultPoint("make_step", request.step()));
    MOONPIPE_ASSIGN_OR_RETURN(Step step, source_->Make(request.step(), cursor_));
    step.manifest.set_step(request.step());
    cursor_ = step.manifest.next_cursor();
    ++next_step_;
    *published.mutable_manifest() = step.manifest;
    // The step before may still be in work when the next is asked for; older ones are over.
    if (request.step() > 2) service_->DropBefore(request.step() - 2);
    service_->Hold(std::make_shared<const Step>(std::move(step)));
    return absl::OkStatus();
  }

  absl::Status PrepareDecode(const PrepareStep& request, PublishManifest& published) {
    const auto& round = request.decode();
    StepSourceOptions options = options_;
    options.files.assign(round.files().begin(), round.files().end());
    const std::string key = absl::StrJoin(options.files, "\n");
    std::unique_ptr<DecodeSource>& source = decode_sources_[key];
    if (source == nullptr) {
      MOONPIPE_ASSIGN_OR_RETURN(source, OpenDecodeSource(options));
    }
    std::vector<std::vector<int32_t>> answers(source->size());
    std::vector<bool> done(source->size(), false);
    if (round.answers().empty()) {
      for (size_t i = 0; i < source->size(); ++i) {
        const auto& reference = source->references()[i];
        published.add_references()->mutable_tokens()->Add(reference.begin(), reference.end());
        published.add_reference_texts(source->reference_texts()[i]);
      }
    } else {
      if (static_cast<size_t>(round.answers_size()) != source->size()) {
        return absl::InvalidArgumentError(
            absl::StrCat(round.answers_size(), " answers were given for a set of ", source->size(), " samples"));
      }
      for (size_t i = 0; i < source->size(); ++i) {
        const auto& answer = round.answers(static_cast<int>(i));
        answers[i].assign(answer.tokens().begin(), answer.tokens().end());
        done[i] = answer.done();
        published.add_answer_texts(source->Text(answers[i]));
      }
    }
    MOONPIPE_ASSIGN_OR_RETURN(Step step, source->Make(answers, done, round.control() == "swap-pictures"));
    step.manifest.set_step(request.step());
    *published.mutable_manifest() = step.manifest;
    service_->Drop(request.step() - 1);
    service_->Hold(std::make_shared<const Step>(std::move(step)));
    return absl::OkStatus();
  }

  const Plan plan_;
  DataloaderService* const service_;
  StepSourceOptions options_;
  std::unique_ptr<StepSource> source_;
  std::map<std::string, std::unique_ptr<DecodeSource>> decode_sources_;
  data::v1::DataCursor cursor_;
  uint64_t next_step_ = 1;
};

}  // namespace

absl::Status ServeDataloader(CoordinatorClient* client, DataloaderService* service, MetricsRegistry* registry) {
  std::unique_ptr<DataPlan> plan;
  std::optional<DataloaderMetrics> metrics;
  while (true) {
    MOONPIPE_ASSIGN_OR_RETURN(const ConnectResponse command, client->Next(absl::InfiniteFuture()));
    ConnectRequest event;
    switch (command.command_case()) {
      case ConnectResponse::kPlan: {
        client->SetActivity("opening data", "");
        plan = std::make_unique<DataPlan>(command.plan(), service);
        metrics.emplace(registry, command.plan().run());
        if (absl::Status started = plan->Start(*metrics); !started.ok()) {
          worker::v1::WorkerFailure& failure = *event.mutable_failure();
          failure.set_generation(command.plan().generation());
          failure.set_code(static_cast<int32_t>(started.code()));
          failure.set_message(std::string(started.message()));
          failure.set_microbatch(-1);
          client->Send(std::move(event));
          return started;
        }
        event.mutable_plan_ready()->set_generation(command.plan().generation());
        break;
      }
      case ConnectResponse::kPrepareStep: {
        client->SetActivity(absl::StrCat("making step ", command.prepare_step().step()), "");
        const absl::Time begin = absl::Now();
        *event.mutable_publish_manifest() = plan->Prepare(command.prepare_step());
        metrics->step_duration.Observe(absl::ToDoubleSeconds(absl::Now() - begin));
        for (const auto& microbatch : event.publish_manifest().manifest().microbatches()) {
          metrics->samples_packed.Add(microbatch.samples_size());
        }
        for (const auto& skipped : event.publish_manifest().manifest().skipped()) {
          (skipped.reason() == "too_long" ? metrics->samples_too_long : metrics->samples_corrupt).Add();
        }
        break;
      }
      case ConnectResponse::kDrain:
        MP_LOG(INFO) << "drained: " << command.drain().reason();
        return absl::OkStatus();
      default:
        return absl::InternalError(absl::StrCat("a command that a dataloader does not know: ", command.command_case()));
    }
    client->SetActivity("idle", "");
    client->Send(std::move(event));
  }
}

}  // namespace moonpipe
