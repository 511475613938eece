#include "moonpipe/train/master_weights.h"

#include <torch/torch.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace moonpipe {
namespace {

std::string NameOf(const TensorSpec& spec) { return absl::StrCat("master.", spec.name); }

}  // namespace

std::vector<StoredTensor> MasterWeights(const ParameterStore& store, const WeightForm& form, const std::vector<UpdateRule>& rules) {
  TORCH_CHECK(rules.size() == store.specs().size(), "one rule a tensor: ", rules.size(), " rules for ", store.specs().size());
  std::vector<StoredTensor> masters;
  for (size_t i = 0; i < rules.size(); ++i) {
    const TensorSpec& spec = store.specs()[i];
    if (form.HoldsInFull(spec.name) || (spec.trainable && rules[i].frozen)) continue;
    masters.push_back({NameOf(spec), StoredType::kF32, spec.shape, store.PublishedValue(spec.name).const_data_ptr()});
  }
  return masters;
}

absl::Status LoadMasterWeights(const std::vector<SafetensorsFile>& files, const WeightForm& form, ParameterStore& store) {
  const torch::NoGradGuard no_grad;
  for (const TensorSpec& spec : store.specs()) {
    if (form.HoldsInFull(spec.name)) continue;
    for (const SafetensorsFile& file : files) {
      if (!file.Contains(NameOf(spec))) continue;
      const StoredTensor& stored = **file.Find(NameOf(spec));
      if (stored.type != StoredType::kF32 || stored.shape != spec.shape) {
        return absl::InvalidArgumentError(absl::StrCat("master weight ", stored.name, " in ", file.path(), " is ", stored.ToString(),
                                                       ", the model needs F32[", absl::StrJoin(spec.shape, ", "), "]"));
      }
      store.PublishedValue(spec.name).copy_(torch::from_blob(const_cast<void*>(stored.data), spec.shape, torch::kFloat));
      break;
    }
  }
  return absl::OkStatus();
}

}  // namespace moonpipe
