// A range of decoder layers as a stage. The first embeds tokens and scatters features; the last computes loss or next tokens.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "moonpipe/model/decoder_part.h"
#include "moonpipe/model/parameter_store.h"
#include "moonpipe/model/router.h"
#include "moonpipe/pipeline/stage.h"
#include "moonpipe/spec/safetensors.h"
#include "moonpipe/train/gradients.h"

namespace moonpipe {

class DecoderStage : public Stage {
 public:
  struct Options {
    double expert_bias_rate = 0;
    BiasRule expert_bias_rule = BiasRule::kSign;
    double balance_loss_weight = 0;  // of the mean over a step's documents; 0: none
    double qk_clip_threshold = 0;    // 0: no clip
  };
  // Both must outlive the stage.
  DecoderStage(ParameterStore* store, GradientAccumulator* gradients, const Options& options);
  DecoderStage(ParameterStore* store, GradientAccumulator* gradients) : DecoderStage(store, gradients, Options{}) {}

  absl::Status BeginStep(const StepContext& step) override;
  std::vector<data::v1::MicrobatchView> views() const override;
  absl::StatusOr<torch::Tensor> Forward(uint32_t microbatch, const StageInputs& inputs) override;
  absl::StatusOr<StageGradients> Backward(uint32_t microbatch, const torch::Tensor& output_gradient) override;
  int64_t hidden_size() const override { return store_->config().text.hidden_size; }
  torch::Tensor tied_gradient() override;
  void AddTiedGradient(const torch::Tensor& other) override;
  absl::Status FillReport(worker::v1::StepReport& report) override;

  // After the optimizer's step: moves the selection biases of the experts by the counts of the whole cluster, and scales back the heads
  // whose largest logit in the step exceeded the threshold.
  void AfterStep(const worker::v1::CommitStep& commit);

 private:
  struct InFlight {
    torch::Tensor hidden;    // leaf
    torch::Tensor features;  // leaf
    torch::Tensor output;    // with its graph; the scaled loss for the part with the head
  };
  absl::StatusOr<torch::Tensor> ForwardOrThrow(uint32_t microbatch, const StageInputs& inputs);
  // Tokens or embeddings, and of the features the rows that a token takes.
  absl::Status ReadInputs(uint32_t microbatch, const StageInputs& inputs, InFlight& flight, DecoderInput& input);
  // The microbatch's rows of the recorded choices, where the step has some.
  absl::Status PinRouting(uint32_t microbatch);

  const Options options_;
  ParameterStore* const store_;
  GradientAccumulator* const gradients_;
  DecoderPart part_;
  StepContext step_;
  std::map<uint32_t, InFlight> in_flight_;
  std::map<int64_t, torch::Tensor> expert_counts_;  // by layer
  std::map<int64_t, torch::Tensor> largest_logits_;  // by layer, fp32 [heads]
  double balance_scale_ = 0;  // of the step: weight / documents
  torch::Tensor balance_loss_;  // fp32 scalar over the step's microbatches, in the order of their forwards; undefined without
  std::map<uint32_t, worker::v1::MicrobatchLoss> losses_;
  std::map<uint32_t, std::vector<int32_t>> next_tokens_;
  std::optional<SafetensorsFile> pinned_routing_;  // of the step
  bool tied_added_ = false;
};

}  // namespace moonpipe
