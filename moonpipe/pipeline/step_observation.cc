#include "moonpipe/pipeline/step_observation.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/base/torch_status.h"
#include "moonpipe/model/hf_weights.h"

namespace moonpipe {

TensorObserver StepObservation::OfMicrobatch(uint32_t microbatch) {
  return [this, microbatch](const std::string& name, const torch::Tensor& value) {
    // A copy: later work may change it in place. A recomputation shows the same again.
    auto& kept = seen_[name];
    if (!kept.contains(microbatch)) kept.emplace(microbatch, value.detach().to(torch::kCPU).clone());
  };
}

absl::Status StepObservation::Write(const std::string& path, const ParameterStore& store) const {
  const bool embedding_is_a_copy = store.tied_head().defined() && !store.range().has_embedding;
  return CatchTorch([&]() -> absl::Status {
    std::vector<std::pair<std::string, torch::Tensor>> tensors;
    for (const auto& [name, microbatches] : seen_) {
      std::vector<torch::Tensor> parts;
      for (const auto& [microbatch, value] : microbatches) parts.push_back(value);
      tensors.emplace_back(absl::StrCat("out/", name), torch::cat(parts));
    }
    for (const Parameter& parameter : store.parameters()) {
      if (!parameter.value.grad().defined()) continue;
      for (size_t i = 0; i < parameter.published.size(); ++i) {
        if (embedding_is_a_copy && parameter.published[i].name == store.decoder_prefix() + "embed_tokens.weight") continue;
        tensors.emplace_back(absl::StrCat("grad/", parameter.published[i].name), parameter.PublishedGradient(i));
      }
    }
    std::error_code error;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
    if (error) return absl::InternalError(absl::StrCat("cannot create the folder of ", path, ": ", error.message()));
    return WriteTensorFile(path, tensors).status();
  });
}

}  // namespace moonpipe
