#include "moonpipe/pipeline/stage_executor.h"

#include <sys/resource.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "moonpipe/base/fault_point.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/pipeline/schedule.h"

namespace moonpipe {
namespace {

// From stage 0 to the last stage and back.
constexpr char kTiedForward[] = "tied-gradient.forward";
constexpr char kTiedBack[] = "tied-gradient.back";

uint64_t PeakMemoryBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

// The edge an action uses; empty for compute.
std::string EdgeOf(const Action& action) {
  switch (action.type) {
    case ActionType::kSendActivation:
      return absl::StrCat("activation.", action.chunk);
    case ActionType::kReceiveActivation:
      return absl::StrCat("activation.", action.chunk - 1);
    case ActionType::kSendGradient:
      return absl::StrCat("gradient.", action.chunk - 1);
    case ActionType::kReceiveGradient:
      return absl::StrCat("gradient.", action.chunk);
    case ActionType::kSendFeatures:
    case ActionType::kReceiveFeatures:
      return "features";
    case ActionType::kSendFeatureGradient:
    case ActionType::kReceiveFeatureGradient:
      return "feature-gradient";
    case ActionType::kReduceTied:
      return action.chunk == 0 ? kTiedBack : kTiedForward;
    default:
      return "";
  }
}

bool IsVisionWork(const Action& action) {
  switch (action.type) {
    case ActionType::kSendFeatures:
    case ActionType::kReceiveFeatures:
    case ActionType::kSendFeatureGradient:
    case ActionType::kReceiveFeatureGradient:
      return true;
    case ActionType::kForward:
    case ActionType::kBackward:
      return action.chunk == kVisionChunk;
    default:
      return false;
  }
}

}  // namespace

void StageEdges::Abort(const absl::Status& reason) {
  for (auto& [name, edge] : senders) edge->Abort(reason);
  for (auto& [name, edge] : receivers) edge->Abort(reason);
}

absl::StatusOr<worker::v1::StepReport> StageExecutor::Run(const StepContext& step) {
  in_flight_.clear();
  position_ = Position();
  for (Stage* stage : {options_.vision, options_.decoder}) {
    if (stage != nullptr) MOONPIPE_RETURN_IF_ERROR(stage->BeginStep(step));
  }
  worker::v1::StepReport report;
  report.set_generation(step.run->generation());
  report.set_step(step.run->step());
  for (const std::string& text : step.run->actions()) {
    MOONPIPE_ASSIGN_OR_RETURN(const Action action, ParseAction(text));
    position_ = Position{text, EdgeOf(action), action.microbatch};
    if (options_.on_action) options_.on_action(position_.action, position_.edge);
    const auto receiver = options_.edges->receivers.find(position_.edge);
    const bool waits = receiver != options_.edges->receivers.end() && !receiver->second->Ready();
    const int64_t begin = absl::ToUnixMicros(absl::Now());
    if (absl::Status done = Do(step, action); !done.ok()) {
      return Annotate(done, absl::StrCat("step ", step.run->step(), " action ", text));
    }
    worker::v1::ActionTiming* timing = report.add_timings();
    timing->set_action(text);
    timing->set_waited(waits);
    timing->set_begin_us(begin);
    timing->set_end_us(absl::ToUnixMicros(absl::Now()));
  }
  for (auto& [name, edge] : options_.edges->senders) MOONPIPE_RETURN_IF_ERROR(edge->Flush(step.deadline));
  for (Stage* stage : {options_.vision, options_.decoder}) {
    if (stage != nullptr) MOONPIPE_RETURN_IF_ERROR(stage->FillReport(report));
  }
  auto add_edge = [&](const std::string& name, const EdgeCounters& counters, const std::string& transport, bool sends) {
    EdgeMark& mark = marks_[name];
    worker::v1::EdgeBytes* bytes = report.add_edges();
    bytes->set_edge(name);
    bytes->set_payload_bytes(counters.payload_bytes - mark.payload_bytes);
    bytes->set_frame_bytes(counters.frame_bytes - mark.frame_bytes);
    bytes->set_transport(transport);
    bytes->set_sends(sends);
    mark = EdgeMark{counters.payload_bytes, counters.frame_bytes};
  };
  for (auto& [name, edge] : options_.edges->senders) add_edge(name, edge->counters(), edge->transport(), true);
  for (auto& [name, edge] : options_.edges->receivers) add_edge(name, edge->counters(), edge->transport(), false);
  report.set_peak_memory_bytes(PeakMemoryBytes());
  position_ = Position();
  if (options_.on_action) options_.on_action("idle", "");
  return report;
}

absl::Status StageExecutor::Do(const StepContext& step, const Action& action) {
  if (action.type == ActionType::kReport) return absl::OkStatus();
  if (action.type == ActionType::kReduceTied) return ReduceTied(step);
  const auto& manifest = step.run->manifest();
  if (action.microbatch < 0 || action.microbatch >= manifest.microbatches_size()) {
    return absl::InvalidArgumentError(absl::StrCat("microbatch ", action.microbatch, " is not in the manifest of ",
                                                   manifest.microbatches_size()));
  }
  const auto microbatch = static_cast<uint32_t>(action.microbatch);
  const auto& shape = manifest.microbatches(action.microbatch);
  if (IsVisionWork(action) && shape.feature_rows() == 0) return absl::OkStatus();

  Stage* stage = action.chunk == kVisionChunk ? options_.vision : options_.decoder;
  if (stage == nullptr || (action.chunk != kVisionChunk && action.chunk != options_.decoder_chunk)) {
    return absl::InvalidArgumentError("the action is not for a chunk of this worker");
  }
  InFlight& flight = in_flight_[microbatch];
  const std::string edge = EdgeOf(action);
  const std::vector<int64_t> hidden_shape = {shape.tokens(), stage->hidden_size()};
  const std::vector<int64_t> feature_shape = {shape.feature_rows(), stage->hidden_size()};
  switch (action.type) {
    case ActionType::kForward: {
      MOONPIPE_RETURN_IF_ERROR(FaultPoint("forward", step.run->step(), action.microbatch));
      if (action.chunk == kVisionChunk) {
        MOONPIPE_ASSIGN_OR_RETURN(flight.features, stage->Forward(microbatch, {}));
        return absl::OkStatus();
      }
      StageInputs inputs{std::exchange(flight.hidden, {}), std::exchange(flight.features, {})};
      if (step.run->zero_features() && inputs.features.defined()) inputs.features = torch::zeros_like(inputs.features);
      MOONPIPE_ASSIGN_OR_RETURN(flight.output, stage->Forward(microbatch, inputs));
      return absl::OkStatus();
    }
    case ActionType::kBackward: {
      MOONPIPE_RETURN_IF_ERROR(FaultPoint("backward", step.run->step(), action.microbatch));
      if (action.chunk == kVisionChunk) {
        MOONPIPE_ASSIGN_OR_RETURN(StageGradients none, stage->Backward(microbatch, std::exchange(flight.feature_gradient, {})));
        return absl::OkStatus();
      }
      MOONPIPE_ASSIGN_OR_RETURN(StageGradients gradients,
                                stage->Backward(microbatch, std::exchange(flight.output_gradient, {})));
      flight.hidden_gradient = gradients.hidden;
      flight.feature_gradient = gradients.features;
      return absl::OkStatus();
    }
    case ActionType::kSendActivation:
      return Send(step, edge, microbatch, std::exchange(flight.output, {}));
    case ActionType::kSendGradient:
      return Send(step, edge, microbatch, std::exchange(flight.hidden_gradient, {}));
    case ActionType::kSendFeatures:
      return Send(step, edge, microbatch, std::exchange(flight.features, {}));
    case ActionType::kSendFeatureGradient:
      return Send(step, edge, microbatch, std::exchange(flight.feature_gradient, {}));
    case ActionType::kReceiveActivation: {
      MOONPIPE_ASSIGN_OR_RETURN(flight.hidden, Receive(step, edge, microbatch, hidden_shape));
      return absl::OkStatus();
    }
    case ActionType::kReceiveGradient: {
      MOONPIPE_ASSIGN_OR_RETURN(flight.output_gradient, Receive(step, edge, microbatch, hidden_shape));
      return absl::OkStatus();
    }
    case ActionType::kReceiveFeatures: {
      MOONPIPE_ASSIGN_OR_RETURN(flight.features, Receive(step, edge, microbatch, feature_shape));
      return absl::OkStatus();
    }
    case ActionType::kReceiveFeatureGradient: {
      MOONPIPE_ASSIGN_OR_RETURN(flight.feature_gradient, Receive(step, edge, microbatch, feature_shape));
      return absl::OkStatus();
    }
    default:
      return absl::InvalidArgumentError("the executor does not know the action");
  }
}

absl::Status StageExecutor::Send(const StepContext& step, const std::string& edge, uint32_t microbatch,
                                 const torch::Tensor& tensor) {
  auto sender = options_.edges->senders.find(edge);
  if (sender == options_.edges->senders.end()) return absl::InternalError(absl::StrCat("no edge '", edge, "' leaves this worker"));
  if (!tensor.defined()) return absl::InternalError(absl::StrCat("nothing was computed for edge '", edge, "'"));
  auto owner = std::make_shared<torch::Tensor>(tensor.detach().contiguous());
  MessageHeader header;
  header.generation = step.run->generation();
  header.step = step.run->step();
  header.microbatch = microbatch;
  header.type = WireType::kFloat32;
  header.shape = owner->sizes().vec();
  Payload payload{owner->data_ptr(), static_cast<uint64_t>(owner->nbytes()), owner};
  return sender->second->Send(header, std::move(payload), step.deadline);
}

absl::StatusOr<torch::Tensor> StageExecutor::Receive(const StepContext& step, const std::string& edge, uint32_t microbatch,
                                                     std::vector<int64_t> shape) {
  auto receiver = options_.edges->receivers.find(edge);
  if (receiver == options_.edges->receivers.end()) {
    return absl::InternalError(absl::StrCat("no edge '", edge, "' comes to this worker"));
  }
  torch::Tensor tensor = torch::empty(shape, torch::kFloat32);
  MessageHeader expected;
  expected.generation = step.run->generation();
  expected.step = step.run->step();
  expected.microbatch = microbatch;
  expected.type = WireType::kFloat32;
  expected.shape = std::move(shape);
  MOONPIPE_RETURN_IF_ERROR(receiver->second->Receive(expected, tensor.data_ptr(), step.deadline));
  return tensor;
}

absl::Status StageExecutor::ReduceTied(const StepContext& step) {
  Stage& stage = *options_.decoder;
  torch::Tensor own = stage.tied_gradient();
  if (!own.defined()) return absl::InternalError("the stage has no tied gradient to exchange");
  const bool first = options_.decoder_chunk == 0;
  MOONPIPE_RETURN_IF_ERROR(Send(step, first ? kTiedForward : kTiedBack, 0, own));
  MOONPIPE_ASSIGN_OR_RETURN(torch::Tensor other, Receive(step, first ? kTiedBack : kTiedForward, 0, own.sizes().vec()));
  // Adding changes the gradient in place; an edge may still be writing it.
  MOONPIPE_RETURN_IF_ERROR(options_.edges->senders.at(first ? kTiedForward : kTiedBack)->Flush(step.deadline));
  stage.AddTiedGradient(other);
  return absl::OkStatus();
}

}  // namespace moonpipe
