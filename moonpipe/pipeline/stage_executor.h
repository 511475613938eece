// Walks the action list of a step. One executor serves the vision encoder and the decoder stages alike: it knows edges and order,
// the stages know tensors. A microbatch without pictures passes the tower and its edges as nothing: both ends know it from the
// manifest, so nobody waits.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "moonpipe/comm/edge.h"
#include "moonpipe/pipeline/stage.h"

namespace moonpipe {

// The edges of one worker by name. Names follow the sender: `activation.N` and `gradient.N` join stages N and N+1, `features` and
// `feature-gradient` the tower and stage 0, `tied-gradient.forward` and `tied-gradient.back` first and last stage.
struct StageEdges {
  std::map<std::string, std::unique_ptr<SendEdge>> senders;
  std::map<std::string, std::unique_ptr<ReceiveEdge>> receivers;

  // Ends every wait. Safe from any thread.
  void Abort(const absl::Status& reason);
};

class StageExecutor {
 public:
  struct Options {
    Stage* vision = nullptr;   // not owned; null where the worker has no tower
    Stage* decoder = nullptr;  // not owned; null where the worker has no decoder layers
    int32_t decoder_chunk = 0;
    StageEdges* edges = nullptr;
    // Told before every action, with the edge it may wait on.
    std::function<void(const std::string& action, const std::string& edge)> on_action;
  };
  explicit StageExecutor(Options options) : options_(std::move(options)) {}

  // Where a failed step stood.
  struct Position {
    std::string action;
    std::string edge;
    int32_t microbatch = -1;
  };

  // Runs all actions and returns the report. The error names the action; position() tells the rest. INVALID_ARGUMENT for an action
  // that this worker cannot do.
  absl::StatusOr<worker::v1::StepReport> Run(const StepContext& step);
  const Position& position() const { return position_; }

 private:
  struct InFlight {
    torch::Tensor hidden;
    torch::Tensor features;
    torch::Tensor output;
    torch::Tensor output_gradient;
    torch::Tensor hidden_gradient;
    torch::Tensor feature_gradient;
  };
  struct EdgeMark {
    uint64_t payload_bytes = 0;
    uint64_t frame_bytes = 0;
  };

  absl::Status Do(const StepContext& step, const struct Action& action);
  absl::Status Send(const StepContext& step, const std::string& edge, uint32_t microbatch, const torch::Tensor& tensor);
  absl::StatusOr<torch::Tensor> Receive(const StepContext& step, const std::string& edge, uint32_t microbatch,
                                        std::vector<int64_t> shape);
  absl::Status ReduceTied(const StepContext& step);

  const Options options_;
  Position position_;
  std::map<uint32_t, InFlight> in_flight_;
  std::map<std::string, EdgeMark> marks_;
};

}  // namespace moonpipe
