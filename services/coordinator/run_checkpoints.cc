#include "services/coordinator/run_session.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/run_file.h"
#include "services/coordinator/machine.h"

namespace moonpipe {

using cluster::v1::Checkpoint;
using worker::v1::ConnectResponse;

absl::Status RunSession::Save(uint64_t step) {
  if (last_saved_ == step) return absl::OkStatus();
  MOONPIPE_RETURN_IF_ERROR(AwaitCommitted(step));
  const absl::Time begin = absl::Now();
  absl::Time written = begin;
  Checkpoint checkpoint;
  checkpoint.set_name(absl::StrFormat("%s/checkpoints/step-%08d", job_.run.name(), step));
  checkpoint.set_step(step);
  checkpoint.set_state(Checkpoint::STATE_SAVING);
  options_.runs->PutCheckpoint(job_.id, checkpoint);
  const absl::StatusOr<CheckpointInfo> saved = WriteCheckpoint(step, &written);
  if (!saved.ok()) {
    checkpoint.set_state(Checkpoint::STATE_FAILED);
    checkpoint.set_error(std::string(saved.status().message()));
    options_.runs->PutCheckpoint(job_.id, checkpoint);
    return saved.status();
  }
  last_saved_ = step;
  options_.runs->PutCheckpoint(job_.id, ReadyCheckpoint(*saved));
  metrics_->checkpoint_write_duration.Observe(absl::ToDoubleSeconds(written - begin));
  metrics_->checkpoint_commit_duration.Observe(absl::ToDoubleSeconds(absl::Now() - written));
  metrics_->checkpoint_last_success_timestamp.Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  metrics_->checkpoint_bytes.Add(static_cast<double>(saved->size_bytes));
  MP_LOG(INFO) << "checkpoint of step " << step << " is in " << saved->path;
  return absl::OkStatus();
}

absl::StatusOr<CheckpointInfo> RunSession::WriteCheckpoint(uint64_t step, absl::Time* shards_written) {
  MOONPIPE_ASSIGN_OR_RETURN(const std::string writing, ledger_->Begin(step));
  // Numbered by place, not by the order in which workers registered: the same state gives the same files.
  const std::vector<uint32_t> writers = plan_.ScheduleWorkers();
  uint32_t shard = 0;
  for (const uint32_t worker : writers) {
    ConnectResponse command;
    worker::v1::SaveShards& save = *command.mutable_save_shards();
    save.set_generation(generation_);
    save.set_step(step);
    save.set_folder(writing);
    save.set_shard(++shard);
    save.set_shards(static_cast<uint32_t>(writers.size()));
    pool_->Send(worker, std::move(command));
  }
  MOONPIPE_RETURN_IF_ERROR(pool_->Await(
      absl::StrCat("the workers wrote the checkpoint of step ", step),
      absl::Now() + absl::Seconds(spec_.runtime().save_timeout_seconds()), [&] { return Missing(pool_->saved[step]).empty(); },
      [&] { return Missing(pool_->saved[step]); }));
  *shards_written = absl::Now();
  CheckpointContent content;
  for (const auto& [worker, saved] : pool_->saved[step]) {
    if (!saved.error().empty()) {
      return absl::InternalError(absl::StrCat(pool_->NameOf(worker), " could not write its shard: ", saved.error()));
    }
    content.shards.insert(content.shards.end(), saved.files().begin(), saved.files().end());
  }
  pool_->saved.erase(step);
  // Weights that were decoded are not what the file's quantization_config says.
  content.config_json = spec_.model().keep_quantised() ? config_.json : WithoutQuantization(config_.json);
  for (const char* name : {"tiktoken.model", "tokenizer_config.json"}) {
    if (spec_.data().tokenizer().empty()) break;  // trained on recorded batches
    content.data_files.push_back(absl::StrCat(spec_.data().tokenizer(), "/", name));
  }
  for (const std::string& folder : PreprocessorFolders(spec_)) {
    const std::string path = folder + "/preprocessor_config.json";
    if (!std::filesystem::exists(path)) continue;
    content.data_files.push_back(path);
    break;
  }
  content.manifest.cursor = cursor_;
  content.manifest.seed = spec_.train().seed();
  content.manifest.spec = spec_;
  content.manifest.compute_threads = spec_.runtime().compute_threads();
  content.manifest.cpu_model = CpuModel();
  content.manifest.torch_version = kTorchVersion;
  content.manifest.ready_time = absl::Now();
  MOONPIPE_ASSIGN_OR_RETURN(CheckpointInfo info, ledger_->Finish(step, content));
  MOONPIPE_ASSIGN_OR_RETURN(const std::vector<std::string> removed, ledger_->Retain(spec_.checkpoint().keep_last(), step));
  for (const std::string& path : removed) {
    MP_LOG(INFO) << "checkpoint " << path << " is removed: " << step << " is newer";
    options_.runs->ForgetCheckpoint(
        job_.id, absl::StrCat(job_.run.name(), "/checkpoints/", std::filesystem::path(path).filename().string()));
  }
  return info;
}

Checkpoint RunSession::ReadyCheckpoint(const CheckpointInfo& info) const {
  Checkpoint checkpoint;
  checkpoint.set_name(absl::StrCat(job_.run.name(), "/checkpoints/", CheckpointLedger::NameOf(info.step)));
  checkpoint.set_step(info.step);
  checkpoint.set_state(Checkpoint::STATE_READY);
  checkpoint.set_path(info.path);
  checkpoint.set_size_bytes(info.size_bytes);
  checkpoint.set_manifest_sha256(info.manifest_sha256);
  checkpoint.mutable_ready_time()->set_seconds(absl::ToUnixSeconds(info.manifest.ready_time));
  return checkpoint;
}

}  // namespace moonpipe
