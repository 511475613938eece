#include <CLI/CLI.hpp>
#include <iostream>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cli/control_client.h"
#include "cli/parity_command.h"
#include "cli/plan_command.h"
#include "cli/train_command.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/runtime/terminal.h"

namespace moonpipe {
namespace {

using cluster::v1::TrainingRun;

std::string StateName(const TrainingRun& run) {
  return std::string(absl::StripPrefix(TrainingRun::State_Name(run.state()), "STATE_"));
}

void PrintRun(const TrainingRun& run) {
  std::cout << run.name() << "  " << StateName(run) << "  step " << run.step() << " of " << run.spec().train().steps() << "  "
            << run.folder() << "\n";
  if (!run.error().empty()) std::cout << "  " << run.error() << "\n";
}

absl::Status Submit(ControlClient& client, const std::string& run_file, const std::vector<std::string>& overrides,
                    const std::string& id, bool validate_only) {
  MOONPIPE_ASSIGN_OR_RETURN(const auto spec, LoadRunFile(run_file, overrides));
  cluster::v1::CreateTrainingRunRequest request;
  *request.mutable_spec() = spec;
  request.set_training_run_id(id);
  request.set_validate_only(validate_only);
  MOONPIPE_ASSIGN_OR_RETURN(const TrainingRun run, client.Create(request));
  if (validate_only) {
    std::cout << "the run file is good\n";
  } else {
    PrintRun(run);
  }
  return absl::OkStatus();
}

absl::Status Status(ControlClient& client, const std::string& id) {
  if (!id.empty()) {
    MOONPIPE_ASSIGN_OR_RETURN(const TrainingRun run, client.Get(RunName(id)));
    PrintRun(run);
    return absl::OkStatus();
  }
  MOONPIPE_ASSIGN_OR_RETURN(const std::vector<TrainingRun> runs, client.List());
  for (const TrainingRun& run : runs) PrintRun(run);
  if (runs.empty()) std::cout << "no runs\n";
  return absl::OkStatus();
}

absl::Status Watch(ControlClient& client, const std::string& id, uint64_t after_step, bool json) {
  ProgressPrinter printer(STDOUT_FILENO, json ? StepOutput::kJson : StepOutput::kText);
  return client.Watch(RunName(id), after_step, [&](const cluster::v1::WatchTrainingRunResponse& event) {
    if (event.has_step()) {
      printer.Step(event.step());
    } else if (!json) {
      const TrainingRun& run = event.training_run();
      printer.Line(absl::StrCat(run.name(), " is ", StateName(run), run.error().empty() ? "" : absl::StrCat(": ", run.error())));
    }
    return true;
  });
}

absl::Status PrintChanged(absl::StatusOr<TrainingRun> run) {
  if (run.ok()) PrintRun(*run);
  return run.status();
}

// Saves and waits until the checkpoint is there.
absl::Status Save(ControlClient& client, const std::string& id, double timeout_seconds) {
  MOONPIPE_ASSIGN_OR_RETURN(cluster::v1::Checkpoint checkpoint, client.Save(RunName(id)));
  const absl::Time deadline = absl::Now() + absl::Seconds(timeout_seconds);
  while (checkpoint.state() == cluster::v1::Checkpoint::STATE_SAVING) {
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(checkpoint.name(), " is still being written after ", timeout_seconds, " s"));
    }
    absl::SleepFor(absl::Milliseconds(100));
    MOONPIPE_ASSIGN_OR_RETURN(checkpoint, client.GetCheckpoint(checkpoint.name()));
  }
  if (checkpoint.state() == cluster::v1::Checkpoint::STATE_FAILED) {
    return absl::InternalError(absl::StrCat(checkpoint.name(), " failed: ", checkpoint.error()));
  }
  std::cout << checkpoint.name() << "  " << checkpoint.path() << "  " << checkpoint.size_bytes() << " bytes\n";
  return absl::OkStatus();
}

CLI::App* AddPlanCommand(CLI::App* app, PlanArguments* plan) {
  CLI::App* command = app->add_subcommand("plan", "Parameters, layers, memory and FLOPs of a model or a run file, before anything starts");
  command->add_option("run-file", plan->run_file, "The run file (YAML); or --model");
  command->add_option("--model", plan->model, "A flavour (kimi-k2.5), a model folder or a config.json");
  command->add_option("--set", plan->overrides, "Override a field: --set vision.placement=first_stage");
  command->add_option("--stages", plan->stages, "Decoder stages");
  command->add_option("--layers-per-stage", plan->layers_per_stage, "Decoder layers of each stage; evenly by cost without it")->delimiter(',');
  command->add_option("--microbatches", plan->microbatches, "Microbatches of a step, over all replicas");
  command->add_option("--microbatch-tokens", plan->microbatch_tokens, "Tokens of a microbatch");
  command->add_option("--schedule", plan->schedule, "1f1b or gpipe");
  command->add_option("--data", plan->parallel.data, "Copies of the model")->capture_default_str();
  command->add_option("--expert", plan->parallel.expert, "Devices that share a copy's routed experts")->capture_default_str();
  command->add_option("--tensor", plan->parallel.tensor, "Devices that share heads and widths")->capture_default_str();
  command->add_option("--context", plan->parallel.context, "Devices that share the tokens of a microbatch")->capture_default_str();
  command->add_option("--pictures", plan->pictures, "Pictures of a microbatch; 1 where the model sees and one fits");
  command->add_option("--grid", plan->grid, "Patches of a picture: ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS")->capture_default_str();
  command->add_option("--manifest", plan->manifest, "Count this step: moonpipe.data.v1.StepManifest in JSON");
  command->add_option("--device", plan->device, "Name of the device, for its peak: \"NVIDIA H200\"");
  command->add_option("--format", plan->format, "text or json")->check(CLI::IsMember({"text", "json"}))->capture_default_str();
  return command;
}

int Main(int argc, char** argv) {
  CLI::App app("moonpipe trains Kimi multimodal models as a cluster of services");
  app.require_subcommand(1);
  absl::Status status;

  TrainArguments train;
  CLI::App* train_command = app.add_subcommand("train", "Train on a cluster of processes on this machine");
  train_command->add_option("run-file", train.run_file, "The run file (YAML)")->required();
  train_command->add_option("--set", train.overrides, "Override a field: --set pipeline.stages=4");
  train_command->add_option("--runs-folder", train.runs_folder, "Where a new run gets its folder")->capture_default_str();
  train_command->add_option("--run-folder", train.run_folder, "The folder of this run; an old one is gone on with");
  train_command->add_option("--resume", train.resume, "auto, never, a step or the path of a checkpoint");
  std::string train_log = "text";
  train_command->add_option("--log-format", train_log, "text or json")->check(CLI::IsMember({"text", "json"}));
  train_command->callback([&] {
    train.json = train_log == "json";
    status = TrainCommand(train);
  });

  EvalArguments eval;
  CLI::App* eval_command = app.add_subcommand("eval", "Answer held-out sets by greedy decoding through the services");
  eval_command->add_option("run-or-checkpoint", eval.run_or_checkpoint, "A run folder or one of its checkpoints")->required();
  eval_command->add_option("data", eval.files, "Tar files, one set each; by default the sets of the run");
  eval_command->add_option("--set", eval.overrides, "Override a field: --set pipeline.stages=4");
  eval_command->add_flag("--json", eval.json, "One JSON array with all answers");
  eval_command->add_flag("--answers", eval.print_answers, "Print every answer");
  eval_command->callback([&] { status = EvalCommand(eval); });

  PlanArguments plan;
  AddPlanCommand(&app, &plan)->callback([&] { status = PlanCommand(plan); });

  ParityArguments parity;
  CLI::App* parity_command = app.add_subcommand("parity", "Compare with a recorded reference, through the services");
  parity_command->add_option("fixture", parity.fixture, "Folder with config.json, model.safetensors, io.safetensors and meta.json")->required();
  parity_command->add_option("--case", parity.cases, "Only this case; may be given again");
  parity_command->add_option("--stages", parity.stages, "Decoder stages")->capture_default_str();
  parity_command->add_option("--microbatches", parity.microbatches, "Parts into which the batch's rows are cut")->capture_default_str();
  parity_command->add_option("--schedule", parity.schedule, "1f1b or gpipe")->capture_default_str();
  parity_command->add_flag("--pin-routing", parity.pin_routing, "Send tokens to the recorded experts in the step that is compared");
  parity_command->add_option("--set", parity.overrides, "Override a field of the run: --set vision.placement=first_stage");
  parity_command->add_flag("--json", parity.json, "One JSON object with every case");
  parity_command->callback([&] { status = ParityCommand(parity); });

  CLI::App* config_command = app.add_subcommand("config", "Look at run files");
  config_command->require_subcommand(1);
  std::string config_file;
  std::vector<std::string> config_overrides;
  CLI::App* show_command = config_command->add_subcommand("show", "Print the resolved run file, defaults filled in");
  show_command->add_option("run-file", config_file, "The run file (YAML)")->required();
  show_command->add_option("--set", config_overrides, "Override a field");
  show_command->callback([&] {
    const auto spec = LoadRunFile(config_file, config_overrides);
    status = spec.status();
    if (spec.ok()) std::cout << WriteYaml(*spec);
  });

  std::string coordinator, id, run_file;
  std::vector<std::string> overrides;
  bool validate_only = false, json = false;
  uint64_t after_step = 0;
  double timeout_seconds = 120;
  auto remote = [&](const char* name, const char* help, bool needs_id) {
    CLI::App* command = app.add_subcommand(name, help);
    command->add_option("--coordinator", coordinator, "HOST:PORT of the coordinator")->required()->envname("MOONPIPE_COORDINATOR");
    if (needs_id) command->add_option("run", id, "Id or name of the run")->required();
    return command;
  };
  CLI::App* submit = remote("submit", "Create a run on a cluster", false);
  submit->add_option("run-file", run_file, "The run file (YAML)")->required();
  submit->add_option("--id", id, "Id of the run; by default its file's name and the time");
  submit->add_option("--set", overrides, "Override a field");
  submit->add_flag("--validate-only", validate_only, "Check everything and create nothing");
  submit->callback([&] {
    ControlClient client(coordinator);
    status = Submit(client, run_file, overrides, id.empty() ? NewRunId(run_file) : id, validate_only);
  });
  CLI::App* show_status = remote("status", "Where runs stand", false);
  show_status->add_option("run", id, "Id or name; all runs without it");
  show_status->callback([&] {
    ControlClient client(coordinator);
    status = Status(client, id);
  });
  CLI::App* watch = remote("watch", "Print steps as they are taken", true);
  watch->add_option("--after-step", after_step, "Only later steps");
  watch->add_flag("--json", json, "One JSON object a step");
  watch->callback([&] {
    ControlClient client(coordinator);
    status = Watch(client, id, after_step, json);
  });
  remote("pause", "Take no further step until resumed", true)->callback([&] {
    ControlClient client(coordinator);
    status = PrintChanged(client.Pause(RunName(id)));
  });
  remote("resume", "Go on after a pause", true)->callback([&] {
    ControlClient client(coordinator);
    status = PrintChanged(client.Resume(RunName(id)));
  });
  remote("stop", "End after the step in progress, with a checkpoint", true)->callback([&] {
    ControlClient client(coordinator);
    status = PrintChanged(client.Stop(RunName(id)));
  });
  CLI::App* save = remote("save", "Write a checkpoint after the step in progress", true);
  save->add_option("--timeout", timeout_seconds, "Longest wait in seconds")->capture_default_str();
  save->callback([&] {
    ControlClient client(coordinator);
    status = Save(client, id, timeout_seconds);
  });

  CLI11_PARSE(app, argc, argv);
  if (status.ok()) return 0;
  std::cerr << "moonpipe: " << status.message() << "\n";
  return 1;
}

}  // namespace
}  // namespace moonpipe

int main(int argc, char** argv) {
  moonpipe::InitLogging("moonpipe", moonpipe::LogFormat::kText);
  return moonpipe::Main(argc, argv);
}
