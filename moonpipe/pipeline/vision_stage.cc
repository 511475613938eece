#include "moonpipe/pipeline/vision_stage.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/base/torch_status.h"
#include "moonpipe/pipeline/step_observation.h"

namespace moonpipe {

VisionStage::VisionStage(ParameterStore* store, GradientAccumulator* gradients)
    : gradients_(gradients),
      hidden_size_(store->config().text.hidden_size),
      patch_size_(store->config().vision->patch_size),
      tower_(*store) {}

absl::Status VisionStage::BeginStep(const StepContext& step) {
  step_ = step;
  had_work_ = false;
  outputs_.clear();
  return absl::OkStatus();
}

absl::StatusOr<torch::Tensor> VisionStage::Forward(uint32_t microbatch, const StageInputs&) {
  const auto& manifest = step_.run->manifest().microbatches(static_cast<int>(microbatch));
  std::vector<PatchGrid> grids;
  int64_t patches = 0;
  for (const auto& grid : manifest.grids()) {
    grids.push_back({grid.frames(), grid.rows(), grid.columns()});
    patches += grids.back().patches();
  }
  MOONPIPE_ASSIGN_OR_RETURN(const std::string pixels,
                            step_.provider->Take(microbatch, data::v1::MICROBATCH_VIEW_PIXELS, step_.deadline));
  const bool normalised = manifest.pixel_type() == data::v1::PIXEL_TYPE_F32;
  const int64_t expected = patches * 3 * patch_size_ * patch_size_ * (normalised ? static_cast<int64_t>(sizeof(float)) : 1);
  if (static_cast<int64_t>(pixels.size()) != expected) {
    return absl::DataLossError(absl::StrCat("microbatch ", microbatch, ": ", pixels.size(), " bytes of pixels came, its ",
                                            grids.size(), " pictures of ", patches, " patches need ", expected));
  }
  had_work_ = true;
  return CatchTorch([&]() -> absl::StatusOr<torch::Tensor> {
    torch::AutoGradMode graph(!step_.run->decode());
    torch::Tensor patches_NCPP = torch::empty({patches, 3, patch_size_, patch_size_}, normalised ? torch::kFloat : torch::kUInt8);
    std::memcpy(patches_NCPP.mutable_data_ptr(), pixels.data(), pixels.size());
    tower_.set_observer(step_.observation == nullptr ? TensorObserver() : step_.observation->OfMicrobatch(microbatch));
    torch::Tensor features_MH = tower_.Forward(patches_NCPP, grids).to(torch::kFloat);  // edges carry fp32
    if (features_MH.size(0) != manifest.feature_rows()) {
      return absl::InternalError(absl::StrCat("microbatch ", microbatch, ": the tower made ", features_MH.size(0),
                                              " feature rows, the manifest announces ", manifest.feature_rows()));
    }
    if (!step_.run->decode()) outputs_[microbatch] = features_MH;
    return features_MH.detach();
  });
}

absl::StatusOr<StageGradients> VisionStage::Backward(uint32_t microbatch, const torch::Tensor& output_gradient) {
  auto output = outputs_.extract(microbatch);
  if (output.empty()) return absl::InternalError(absl::StrCat("microbatch ", microbatch, " has no forward to go back through"));
  return CatchTorch([&]() -> absl::StatusOr<StageGradients> {
    gradients_->Select(microbatch);
    // A frozen tower has no graph.
    if (output.mapped().requires_grad()) output.mapped().backward(output_gradient);
    return StageGradients{};
  });
}

}  // namespace moonpipe
