// What an executor drives: the compute of one chunk of the model. A decoder chunk and the vision tower are both stages; the executor
// moves tensors between them and the edges. One thread calls a stage. Errors of LibTorch come back as Status.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "moonpipe/data/v1/data_service.pb.h"
#include "moonpipe/worker/v1/worker_service.pb.h"
#include "torch/torch.h"

namespace moonpipe {

// Where a stage gets the bytes of a microbatch: the dataloader's client, or a test's map.
class MicrobatchProvider {
 public:
  virtual ~MicrobatchProvider() = default;
  virtual absl::StatusOr<std::string> Take(uint32_t microbatch, data::v1::MicrobatchView view, absl::Time deadline) = 0;
};

class StepObservation;

// One step, as a stage sees it.
struct StepContext {
  const worker::v1::RunStep* run = nullptr;
  MicrobatchProvider* provider = nullptr;
  absl::Time deadline;
  StepObservation* observation = nullptr;  // where the step's tensors are shown, if anywhere
};

struct StageInputs {
  torch::Tensor hidden;    // [tokens, hidden_size]; undefined for the first chunk and for the tower
  torch::Tensor features;  // [feature_rows, hidden_size]; undefined where the microbatch has no picture
};

struct StageGradients {
  torch::Tensor hidden;    // of the hidden input; undefined for the first chunk
  torch::Tensor features;  // of the features; undefined where there were none
};

class Stage {
 public:
  virtual ~Stage() = default;
  // Forgets what an earlier step left, and sets the gradients to zero.
  virtual absl::Status BeginStep(const StepContext& step) = 0;
  // The views this stage takes from the dataloader, in the order of use.
  virtual std::vector<data::v1::MicrobatchView> views() const = 0;
  // The output: hidden states [tokens, hidden_size] for the next chunk, or features [feature_rows, hidden_size] of the tower, without
  // a graph. The chunk with the head computes the loss instead and returns an undefined tensor.
  virtual absl::StatusOr<torch::Tensor> Forward(uint32_t microbatch, const StageInputs& inputs) = 0;
  // Adds to the gradients of the parameters and returns those of the inputs. `output_gradient` is undefined for the chunk with the head.
  virtual absl::StatusOr<StageGradients> Backward(uint32_t microbatch, const torch::Tensor& output_gradient) = 0;
  // Width of the hidden states and features that pass its edges.
  virtual int64_t hidden_size() const = 0;
  // The gradient that this chunk has for a tied embedding, to be exchanged; undefined where nothing is tied. AddTiedGradient adds
  // the other chunk's in the fixed order embedding + head.
  virtual torch::Tensor tied_gradient() { return {}; }
  virtual void AddTiedGradient(const torch::Tensor& other) { (void)other; }
  // Fills in what only the stage knows: norms, losses, expert counts, next tokens.
  virtual absl::Status FillReport(worker::v1::StepReport& report) = 0;
};

}  // namespace moonpipe
