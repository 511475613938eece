// The vision tower and its projector as a stage: pixels of a microbatch in, features out, feature gradients back in.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "moonpipe/model/parameter_store.h"
#include "moonpipe/model/vision_tower.h"
#include "moonpipe/pipeline/stage.h"
#include "moonpipe/train/gradients.h"

namespace moonpipe {

class VisionStage : public Stage {
 public:
  // Both must outlive the stage; the store's part has the tower.
  VisionStage(ParameterStore* store, GradientAccumulator* gradients);

  absl::Status BeginStep(const StepContext& step) override;
  std::vector<data::v1::MicrobatchView> views() const override { return {data::v1::MICROBATCH_VIEW_PIXELS}; }
  absl::StatusOr<torch::Tensor> Forward(uint32_t microbatch, const StageInputs& inputs) override;
  absl::StatusOr<StageGradients> Backward(uint32_t microbatch, const torch::Tensor& output_gradient) override;
  int64_t hidden_size() const override { return hidden_size_; }
  absl::Status FillReport(worker::v1::StepReport&) override { return absl::OkStatus(); }
  // Some microbatch of the step had a picture.
  bool had_work() const { return had_work_; }

 private:
  GradientAccumulator* const gradients_;
  const int64_t hidden_size_;
  const int64_t patch_size_;
  VisionTower tower_;
  StepContext step_;
  bool had_work_ = false;
  std::map<uint32_t, torch::Tensor> outputs_;  // with their graphs, from forward to backward
};

}  // namespace moonpipe
