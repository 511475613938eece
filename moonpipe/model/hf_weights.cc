#include "moonpipe/model/hf_weights.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/nearest_name.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

constexpr size_t kMostListed = 20;

constexpr std::pair<StoredType, torch::Dtype> kTypes[] = {
    {StoredType::kF32, torch::kFloat},  {StoredType::kBF16, torch::kBFloat16},       {StoredType::kF16, torch::kHalf},
    {StoredType::kF64, torch::kDouble}, {StoredType::kI64, torch::kLong},            {StoredType::kI32, torch::kInt},
    {StoredType::kU8, torch::kByte},    {StoredType::kI8, torch::kChar},             {StoredType::kBool, torch::kBool},
    {StoredType::kF8E4M3, torch::kFloat8_e4m3fn},
};

constexpr std::pair<absl::string_view, absl::string_view> kProjectorSpellings[] = {
    {"multi_modal_projector.pre_norm.", "mm_projector.pre_norm."},
    {"multi_modal_projector.linear_1.", "mm_projector.proj.0."},
    {"multi_modal_projector.linear_2.", "mm_projector.proj.2."},
};

std::string Shape(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

void Describe(const std::string& kind, const std::vector<std::string>& items, std::string* text) {
  if (items.empty()) return;
  absl::StrAppend(text, "\n  ", items.size(), " ", kind, ":");
  for (size_t i = 0; i < std::min(items.size(), kMostListed); ++i) absl::StrAppend(text, "\n    ", items[i]);
  if (items.size() > kMostListed) absl::StrAppend(text, "\n    and ", items.size() - kMostListed, " more");
}

// Wraps the mapped bytes without a copy; valid while the file is open.
torch::Tensor View(const StoredTensor& stored, torch::Dtype dtype) {
  return torch::from_blob(const_cast<void*>(stored.data), stored.shape, torch::dtype(dtype));
}

}  // namespace

absl::StatusOr<torch::Dtype> ToTorchType(StoredType type) {
  for (const auto& [stored, dtype] : kTypes) {
    if (stored == type) return dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat("no torch dtype for ", StoredTypeName(type)));
}

absl::StatusOr<StoredType> ToStoredType(torch::Dtype dtype) {
  for (const auto& [stored, known] : kTypes) {
    if (known == dtype) return stored;
  }
  return absl::InvalidArgumentError(absl::StrCat("safetensors files do not hold ", c10::toString(dtype)));
}

std::string OtherProjectorSpelling(absl::string_view name) {
  for (const auto& [kimi_vl, patch_merger] : kProjectorSpellings) {
    if (absl::StartsWith(name, kimi_vl)) return absl::StrCat(patch_merger, name.substr(kimi_vl.size()));
    if (absl::StartsWith(name, patch_merger)) return absl::StrCat(kimi_vl, name.substr(patch_merger.size()));
  }
  return "";
}

absl::StatusOr<torch::Tensor> ToTorch(const StoredTensor& stored) {
  MOONPIPE_ASSIGN_OR_RETURN(const torch::Dtype dtype, ToTorchType(stored.type));
  return View(stored, dtype).clone();
}

absl::StatusOr<PublishedForms> LoadModelFolder(const std::string& folder, ParameterStore& store) {
  MOONPIPE_ASSIGN_OR_RETURN(const ModelFolder files, ModelFolder::Open(folder));
  std::vector<std::string> missing;
  std::vector<std::string> misfit;
  std::set<std::string> expected;
  std::vector<std::string> expected_names;
  const auto spelled = [&](const std::string& name) {
    const std::string other = files.Contains(name) ? "" : OtherProjectorSpelling(name);
    return !other.empty() && files.Contains(other) ? other : name;
  };
  for (const TensorSpec& spec : ListTensors(store.config())) {
    const std::string name = spelled(spec.name);
    expected.insert(name);
    expected_names.push_back(name);
    if (!files.Contains(name)) {
      missing.push_back(spec.name);
      continue;
    }
    MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* stored, files.Find(name));
    if (stored->shape != spec.shape) {
      misfit.push_back(absl::StrCat(name, ": ", Shape(stored->shape), " in ", files.FileOf(name), ", ", Shape(spec.shape), " by config.json"));
    } else if (stored->type != StoredType::kF32 && stored->type != StoredType::kBF16 && stored->type != StoredType::kF16) {
      misfit.push_back(absl::StrCat(name, ": stored as ", StoredTypeName(stored->type), "; F32, BF16 and F16 can be read"));
    }
  }
  std::vector<std::string> unknown;
  for (const std::string& name : files.Names()) {
    if (expected.count(name) > 0 || absl::EndsWith(name, "rotary_emb.inv_freq")) continue;
    std::string line = absl::StrCat(name, " in ", files.FileOf(name));
    // Nearest names are dear over thousands of tensors and only help with the first few.
    if (unknown.size() < 3) {
      const std::vector<std::string> nearest = NearestNames(name, expected_names);
      if (!nearest.empty()) absl::StrAppend(&line, " (nearest known: ", nearest.front(), ")");
    }
    unknown.push_back(std::move(line));
  }
  if (!missing.empty() || !unknown.empty() || !misfit.empty()) {
    std::string text = absl::StrCat(folder, ": the weights do not fit config.json");
    Describe("missing", missing, &text);
    Describe("unknown", unknown, &text);
    Describe("of another shape or dtype", misfit, &text);
    return absl::InvalidArgumentError(text);
  }

  PublishedForms forms;
  for (const TensorSpec& spec : store.specs()) {
    const std::string name = spelled(spec.name);
    MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* stored, files.Find(name));
    MOONPIPE_ASSIGN_OR_RETURN(const torch::Dtype dtype, ToTorchType(stored->type));
    store.PublishedValue(spec.name).copy_(View(*stored, dtype));
    forms[spec.name] = {name, stored->type};
  }
  return forms;
}

absl::StatusOr<uint64_t> WriteTensorFile(const std::string& path, const std::vector<std::pair<std::string, torch::Tensor>>& tensors,
                                         const std::map<std::string, std::string>& metadata) {
  std::vector<torch::Tensor> held;
  std::vector<StoredTensor> stored;
  for (const auto& [name, tensor] : tensors) {
    MOONPIPE_ASSIGN_OR_RETURN(const StoredType type, ToStoredType(tensor.scalar_type()));
    held.push_back(tensor.detach().to(torch::kCPU).contiguous());
    stored.push_back({name, type, tensor.sizes().vec(), held.back().data_ptr()});
  }
  return WriteSafetensors(path, stored, metadata);
}

}  // namespace moonpipe
