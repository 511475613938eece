#include "cli/parity_compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

using Json = nlohmann::json;

// AdamW moves a weight by about the learning rate a step whatever its gradient: half of that is the bound.
constexpr double kParameterBound = 0.5;

std::string Shape(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

int64_t Product(const std::vector<int64_t>& shape, size_t begin) {
  return std::accumulate(shape.begin() + static_cast<std::ptrdiff_t>(begin), shape.end(), int64_t{1}, std::multiplies<>());
}

absl::StatusOr<std::vector<double>> Values(const StoredTensor& tensor) {
  std::vector<double> values(tensor.num_elements());
  const auto copy = [&](const auto* from) { std::copy(from, from + values.size(), values.begin()); };
  switch (tensor.type) {
    case StoredType::kF32:
      copy(static_cast<const float*>(tensor.data));
      return values;
    case StoredType::kF64:
      copy(static_cast<const double*>(tensor.data));
      return values;
    case StoredType::kI64:
      copy(static_cast<const int64_t*>(tensor.data));
      return values;
    case StoredType::kI32:
      copy(static_cast<const int32_t*>(tensor.data));
      return values;
    case StoredType::kBF16: {
      const auto* bits = static_cast<const uint16_t*>(tensor.data);
      for (size_t i = 0; i < values.size(); ++i) {
        const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof(value));
        values[i] = static_cast<double>(value);
      }
      return values;
    }
    default:
      return absl::InvalidArgumentError(absl::StrCat(tensor.name, " is ", tensor.ToString(), "; F32, F64, BF16, I64 or I32 was expected"));
  }
}

// Rows of `width` numbers.
std::vector<double> TakeRows(const std::vector<double>& values, const std::vector<int64_t>& rows, int64_t width) {
  std::vector<double> taken;
  taken.reserve(rows.size() * static_cast<size_t>(width));
  for (const int64_t row : rows) {
    const auto begin = values.begin() + row * width;
    taken.insert(taken.end(), begin, begin + width);
  }
  return taken;
}

void SortRows(std::vector<double>& values, int64_t width) {
  for (auto begin = values.begin(); begin != values.end(); begin += width) std::sort(begin, begin + width);
}

std::string GroupOf(const std::string& name) {
  if (name == "adamw/losses") return "losses of the optimizer steps";
  if (name == "grad_norms") return "gradient norms";
  if (absl::StartsWith(name, "adamw/param/")) return "parameters after the steps";
  if (absl::StartsWith(name, "grad/")) {
    if (absl::StartsWith(name, "grad/vision_tower.")) return "gradients of the vision tower";
    if (absl::StrContains(name, "projector.")) return "gradients of the projector";
    return "gradients of the decoder";
  }
  const absl::string_view out = absl::StripPrefix(name, "out/");
  if (absl::StartsWith(out, "vision.")) return "vision tower";
  if (out == "projected") return "projected features";
  if (out == "inputs_embeds") return "merged embeddings";
  if (out == "norm") return "last hidden state";
  if (out == "token_nll") return "token losses";
  if (absl::StartsWith(out, "router.")) return absl::EndsWith(out, ".indices") ? "router choices" : "router scores and weights";
  if (absl::StartsWith(out, "layers.")) {
    const std::vector<std::string> parts = absl::StrSplit(out, '.');
    return absl::StrCat("layer ", parts[1]);
  }
  return std::string(out);
}

std::string ToleranceOf(const std::string& name) {
  if (name == "adamw/losses") return "adamw_losses";
  if (name == "grad_norms" || absl::StartsWith(name, "grad/")) return "grad";
  if (name == "out/loss") return "loss";
  return name == "out/logits" || name == "out/token_nll" ? "logits" : "forward";
}

// In the order in which a difference spreads through the model.
int OrderOf(const std::string& group) {
  static const std::vector<std::string> kOrder = {"vision tower", "projected features", "merged embeddings", "layer ", "router choices",
                                                  "router scores and weights", "last hidden state", "logits", "token losses", "loss",
                                                  "gradients of the decoder", "gradients of the projector", "gradients of the vision tower",
                                                  "gradient norms", "losses of the optimizer steps", "parameters after the steps"};
  for (size_t i = 0; i < kOrder.size(); ++i) {
    if (absl::StartsWith(group, kOrder[i]) && (group == kOrder[i] || absl::EndsWith(kOrder[i], " "))) return static_cast<int>(i);
  }
  return static_cast<int>(kOrder.size());
}

// The k largest of a row, by falling value.
std::vector<int64_t> Largest(const double* row, int64_t width, int64_t k) {
  std::vector<int64_t> order(static_cast<size_t>(width));
  std::iota(order.begin(), order.end(), 0);
  const auto middle = order.begin() + std::min(k, width);
  std::partial_sort(order.begin(), middle, order.end(), [row](int64_t a, int64_t b) { return std::pair(-row[a], a) < std::pair(-row[b], b); });
  order.erase(middle, order.end());
  return order;
}

double LogSum(const double* row, int64_t width) {
  const double largest = *std::max_element(row, row + width);
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += std::exp(row[i] - largest);
  return largest + std::log(sum);
}

class CaseComparison {
 public:
  CaseComparison(const ParityFixture& fixture, const std::string& batch_case, const ParityRun& run) : fixture_(fixture), case_(batch_case), run_(run) {
    result_.name = batch_case;
  }

  absl::StatusOr<ParityResult> Compare() {
    MOONPIPE_ASSIGN_OR_RETURN(batch_, ReadRecordedBatch(fixture_.recording(), case_, fixture_.config()));
    for (size_t row = 0; row < batch_.layout.rows.size(); ++row) {
      for (const int64_t place : batch_.layout.rows[row].places) places_.push_back(static_cast<int64_t>(row) * batch_.layout.columns + place);
    }
    MOONPIPE_RETURN_IF_ERROR(OpenObserved());
    const std::string prefix = case_ + "/";
    for (const StoredTensor& want : fixture_.recording().tensors()) {
      if (!absl::StartsWith(want.name, prefix)) continue;
      const std::string name = want.name.substr(prefix.size());
      if (!absl::StartsWith(name, "in/")) MOONPIPE_RETURN_IF_ERROR(CompareOne(name, want));
    }
    CheckUnseenPictures();
    std::stable_sort(result_.groups.begin(), result_.groups.end(), [](const ParityGroup& a, const ParityGroup& b) {
      return std::pair(OrderOf(a.name), a.name) < std::pair(OrderOf(b.name), b.name);
    });
    return std::move(result_);
  }

 private:
  absl::Status OpenObserved() {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(run_.observed_folder, error)) {
      if (entry.path().extension() != ".safetensors") continue;
      MOONPIPE_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(entry.path().string()));
      files_.push_back(std::move(file));
    }
    if (error) return absl::NotFoundError(absl::StrCat("the run left nothing in ", run_.observed_folder, ": ", error.message()));
    for (const SafetensorsFile& file : files_) {
      for (const StoredTensor& tensor : file.tensors()) {
        const auto [other, is_new] = observed_.emplace(tensor.name, &tensor);
        if (!is_new) return absl::InternalError(absl::StrCat(tensor.name, " was computed by two workers"));
      }
    }
    if (run_.checkpoint.empty()) return absl::OkStatus();
    MOONPIPE_ASSIGN_OR_RETURN(checkpoint_, ModelFolder::Open(run_.checkpoint));
    return absl::OkStatus();
  }

  ParityGroup& Group(const std::string& name) {
    for (ParityGroup& group : result_.groups) {
      if (group.name == name) return group;
    }
    result_.groups.emplace_back().name = name;
    return result_.groups.back();
  }

  void Fail(const std::string& name, absl::string_view why) {
    ++Group(GroupOf(name)).failed;
    result_.failures.push_back(absl::StrCat(name, ": ", why));
  }

  // Null where the run has no such tensor.
  const StoredTensor* Produced(const std::string& name) const {
    if (absl::StartsWith(name, "adamw/param/")) {
      if (!checkpoint_.has_value()) return nullptr;
      const auto found = checkpoint_->Find(absl::StripPrefix(name, "adamw/param/"));
      return found.ok() ? *found : nullptr;
    }
    const auto found = observed_.find(name);
    return found == observed_.end() ? nullptr : found->second;
  }

  absl::Status CompareOne(const std::string& name, const StoredTensor& want) {
    MOONPIPE_ASSIGN_OR_RETURN(std::vector<double> expected, Values(want));
    if (name == "out/loss" || name == "adamw/losses") {
      const size_t wanted = name == "out/loss" ? 1 : fixture_.adamw().steps + 1;
      if (expected.size() != wanted || run_.losses.size() < wanted) {
        Fail(name, absl::StrCat(run_.losses.size(), " losses were computed, ", expected.size(), " are recorded, ", wanted, " were expected"));
        return absl::OkStatus();
      }
      return Check(name, {run_.losses.begin(), run_.losses.begin() + static_cast<std::ptrdiff_t>(wanted)}, expected);
    }
    if (name == "grad_norms") return CompareNorms(expected);
    const StoredTensor* got = Produced(name);
    if (got == nullptr) {
      Fail(name, "is recorded and was not produced");
      return absl::OkStatus();
    }
    MOONPIPE_ASSIGN_OR_RETURN(std::vector<double> values, Values(*got));
    std::vector<int64_t> shape = want.shape;
    if (const size_t leading = TokenDimensions(name, want.shape); leading > 0) {
      // Recorded with padding; here the tokens that count, packed.
      expected = TakeRows(expected, places_, Product(want.shape, leading));
      shape.erase(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(leading));
      shape.insert(shape.begin(), static_cast<int64_t>(places_.size()));
    }
    if (got->shape != shape) {
      Fail(name, absl::StrCat("has the shape ", Shape(got->shape), ", ", Shape(shape), " was expected"));
      return absl::OkStatus();
    }
    if (absl::EndsWith(name, ".indices")) {
      SortRows(values, shape.back());
      SortRows(expected, shape.back());
      CheckChoices(name, values, expected, shape.back());
      return absl::OkStatus();
    }
    if (absl::EndsWith(name, "wqkv.bias") && absl::StartsWith(name, "adamw/param/")) {
      // The bias of the keys has a gradient of zero but for rounding, which AdamW blows up to whole steps.
      const size_t third = values.size() / 3;
      std::copy_n(expected.begin() + static_cast<std::ptrdiff_t>(third), third, values.begin() + static_cast<std::ptrdiff_t>(third));
    }
    if (name == "out/projected") MeasureFeatures(values, expected, shape.back());
    if (name == "out/logits") MeasureLogits(values, expected, shape.back());
    return Check(name, values, expected);
  }

  // How many leading dimensions of a recorded tensor are rows and columns of the batch; 0 where it does not go by token.
  size_t TokenDimensions(const std::string& name, const std::vector<int64_t>& shape) const {
    if (!absl::StartsWith(name, "out/") || absl::StartsWith(name, "out/vision.") || name == "out/projected") return 0;
    const auto rows = static_cast<int64_t>(batch_.layout.rows.size());
    if (shape.size() >= 2 && shape[0] == rows && shape[1] == batch_.layout.columns) return 2;
    return !shape.empty() && shape[0] == rows * batch_.layout.columns ? 1 : 0;
  }

  absl::Status Check(const std::string& name, const std::vector<double>& got, const std::vector<double>& want) {
    ParityTolerance bound{0, kParameterBound * fixture_.adamw().learning_rate};
    if (!absl::StartsWith(name, "adamw/param/")) {
      MOONPIPE_ASSIGN_OR_RETURN(bound, fixture_.Tolerance(ToleranceOf(name)));
    }
    double largest = 0;
    size_t beyond = 0, worst = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double difference = std::abs(got[i] - want[i]);
      // Written so that what is not a number fails.
      if (!(difference <= bound.atol + bound.rtol * std::abs(want[i]))) ++beyond;
      if (difference <= largest) continue;
      largest = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
      worst = i;
    }
    ParityGroup& group = Group(GroupOf(name));
    ++group.tensors;
    if (largest >= group.largest) {
      group.largest = largest;
      group.worst = name;
    }
    if (beyond == 0) return absl::OkStatus();
    Fail(name, absl::StrFormat("%d of %d entries are beyond rtol %g, atol %g; the largest difference is %.3e at entry %d: %.9g, recorded %.9g", beyond,
                               want.size(), bound.rtol, bound.atol, largest, worst, got[worst], want[worst]));
    return absl::OkStatus();
  }

  void CheckChoices(const std::string& name, const std::vector<double>& got, const std::vector<double>& want, int64_t width) {
    int64_t other = 0, first = -1;
    for (size_t begin = 0; begin < want.size(); begin += static_cast<size_t>(width)) {
      const auto at = static_cast<std::ptrdiff_t>(begin);
      if (std::equal(got.begin() + at, got.begin() + at + width, want.begin() + at)) continue;
      if (other++ == 0) first = static_cast<int64_t>(begin) / width;
    }
    ParityGroup& group = Group(GroupOf(name));
    ++group.tensors;
    if (static_cast<double>(other) >= group.largest) {
      group.largest = static_cast<double>(other);
      group.worst = name;
    }
    if (other > 0) {
      Fail(name, absl::StrCat(other, " of ", want.size() / static_cast<size_t>(width), " tokens go to other experts, the first is token ", first,
                              "; look at the router's logits first, or compare with --pin-routing"));
    }
  }

  absl::Status CompareNorms(const std::vector<double>& expected) {
    const std::vector<std::string>& names = fixture_.grad_norm_names();
    if (names.size() != expected.size()) {
      Fail("grad_norms", absl::StrCat(expected.size(), " are recorded, meta.json names ", names.size()));
      return absl::OkStatus();
    }
    std::vector<double> norms;
    for (const std::string& name : names) {
      const auto found = observed_.find("grad/" + name);
      if (found == observed_.end()) {
        Fail("grad_norms", absl::StrCat("the gradient of ", name, " is recorded and was not produced"));
        return absl::OkStatus();
      }
      MOONPIPE_ASSIGN_OR_RETURN(const std::vector<double> values, Values(*found->second));
      norms.push_back(std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0)));
    }
    return Check("grad_norms", norms, expected);
  }

  // Pictures of which no token takes a row leave the tower and its projector with gradients of exactly zero.
  void CheckUnseenPictures() {
    if (batch_.grids.empty()) return;
    int64_t rows = std::accumulate(batch_.feature_rows.begin(), batch_.feature_rows.end(), int64_t{0});
    for (const RowLayout& row : batch_.layout.rows) {
      for (const data::v1::RowSpan& span : row.masked_features) rows -= span.end() - span.begin();
    }
    if (rows > 0) return;
    for (const auto& [name, tensor] : observed_) {
      const std::string group = GroupOf(name);
      if (group != "gradients of the vision tower" && group != "gradients of the projector") continue;
      const auto* values = static_cast<const float*>(tensor->data);
      const auto count = static_cast<uint64_t>(std::count_if(values, values + tensor->num_elements(), [](float value) { return value != 0; }));
      if (count > 0) Fail(name, absl::StrCat(count, " of ", tensor->num_elements(), " entries are not zero, though no token sees a picture"));
    }
  }

  void MeasureFeatures(const std::vector<double>& got, const std::vector<double>& want, int64_t width) {
    double least = 1;
    for (size_t begin = 0; begin < want.size(); begin += static_cast<size_t>(width)) {
      double dot = 0, own = 0, other = 0;
      for (size_t i = begin; i < begin + static_cast<size_t>(width); ++i) {
        dot += got[i] * want[i];
        own += got[i] * got[i];
        other += want[i] * want[i];
      }
      least = std::min(least, dot / std::sqrt(own * other));
    }
    result_.vision_cosine = least;
  }

  void MeasureLogits(const std::vector<double>& got, const std::vector<double>& want, int64_t width) {
    const size_t tokens = want.size() / static_cast<size_t>(width);
    double top1 = 0, top5 = 0;
    for (size_t token = 0; token < tokens; ++token) {
      const std::vector<int64_t> own = Largest(&got[token * static_cast<size_t>(width)], width, 5);
      const std::vector<int64_t> other = Largest(&want[token * static_cast<size_t>(width)], width, 5);
      top1 += own.front() == other.front();
      const std::set<int64_t> known(other.begin(), other.end());
      const auto shared = std::count_if(own.begin(), own.end(), [&](int64_t id) { return known.contains(id); });
      top5 += static_cast<double>(shared) / static_cast<double>(own.size());
    }
    result_.top1_agreement = top1 / static_cast<double>(tokens);
    result_.top5_agreement = top5 / static_cast<double>(tokens);
    double largest = 0;
    size_t end = 0;
    for (const RowLayout& row : batch_.layout.rows) {
      for (const uint32_t length : row.document_lengths) {
        end += length;
        const double* own = &got[(end - 1) * static_cast<size_t>(width)];
        const double* other = &want[(end - 1) * static_cast<size_t>(width)];
        const double own_sum = LogSum(own, width), other_sum = LogSum(other, width);
        double divergence = 0;
        for (int64_t i = 0; i < width; ++i) divergence += std::exp(other[i] - other_sum) * ((other[i] - other_sum) - (own[i] - own_sum));
        largest = std::max(largest, divergence);
      }
    }
    result_.last_token_kl = largest;
  }

  const ParityFixture& fixture_;
  const std::string case_;
  const ParityRun& run_;
  RecordedBatch batch_;
  std::vector<int64_t> places_;  // of the packed tokens among rows x columns
  std::vector<SafetensorsFile> files_;
  std::map<std::string, const StoredTensor*> observed_;
  std::optional<ModelFolder> checkpoint_;
  ParityResult result_;
};

}  // namespace

absl::StatusOr<ParityFixture> ParityFixture::Open(const std::string& folder) {
  ParityFixture fixture;
  fixture.folder_ = folder;
  MOONPIPE_ASSIGN_OR_RETURN(fixture.config_, ReadModelConfig(folder + "/config.json"));
  MOONPIPE_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(folder + "/io.safetensors"));
  fixture.recording_ = std::move(file);
  const std::string path = folder + "/meta.json";
  MOONPIPE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  try {
    const Json meta = Json::parse(text);
    for (const auto& [kind, bound] : meta.at("tolerances").items()) {
      // Some are words, such as those on the router's choices.
      if (bound.is_object()) fixture.tolerances_[kind] = {bound.at("rtol").get<double>(), bound.at("atol").get<double>()};
    }
    if (meta.contains("grad_norm_names")) meta["grad_norm_names"].get_to(fixture.grad_norm_names_);
    if (meta.contains("adamw")) {
      const Json& adamw = meta["adamw"];
      fixture.adamw_ = {adamw.at("lr").get<double>(),  adamw.at("betas").at(0).get<double>(),   adamw.at("betas").at(1).get<double>(),
                        adamw.at("eps").get<double>(), adamw.at("weight_decay").get<double>(), adamw.at("steps").get<uint64_t>()};
    }
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.what()));
  }
  if (fixture.cases().empty()) return absl::InvalidArgumentError(absl::StrCat(folder, "/io.safetensors has no CASE/in/input_ids: nothing to run"));
  return fixture;
}

absl::StatusOr<ParityTolerance> ParityFixture::Tolerance(const std::string& kind) const {
  const auto found = tolerances_.find(kind);
  if (found != tolerances_.end()) return found->second;
  return absl::InvalidArgumentError(absl::StrCat(folder_, "/meta.json has no tolerances.", kind));
}

nlohmann::ordered_json ParityResult::ToJson() const {
  nlohmann::ordered_json json = {{"case", name}, {"passed", failures.empty()}, {"groups", nlohmann::ordered_json::array()}};
  for (const ParityGroup& group : groups) {
    json["groups"].push_back({{"name", group.name},
                              {"tensors", group.tensors},
                              {"largest_difference", std::isfinite(group.largest) ? nlohmann::ordered_json(group.largest) : nullptr},
                              {"worst", group.worst},
                              {"failed", group.failed}});
  }
  const auto add = [&](const char* key, const std::optional<double>& value) {
    if (value.has_value()) json[key] = *value;
  };
  add("vision_cosine", vision_cosine);
  add("last_token_kl", last_token_kl);
  add("top1_agreement", top1_agreement);
  add("top5_agreement", top5_agreement);
  json["failures"] = failures;
  return json;
}

absl::StatusOr<ParityResult> CompareCase(const ParityFixture& fixture, const std::string& batch_case, const ParityRun& run) {
  return CaseComparison(fixture, batch_case, run).Compare();
}

absl::Status WritePinnedRouting(const ParityFixture& fixture, const std::string& batch_case, const std::string& path) {
  MOONPIPE_ASSIGN_OR_RETURN(const RecordedBatch batch, ReadRecordedBatch(fixture.recording(), batch_case, fixture.config()));
  const std::string prefix = batch_case + "/out/router.layers.";
  std::vector<StoredTensor> tensors;
  std::vector<std::vector<int64_t>> kept;
  for (const StoredTensor& recorded : fixture.recording().tensors()) {
    if (!absl::StartsWith(recorded.name, prefix) || !absl::EndsWith(recorded.name, ".indices")) continue;
    const auto rows = static_cast<int64_t>(batch.layout.rows.size()) * batch.layout.columns;
    if (recorded.type != StoredType::kI64 || recorded.shape.size() != 2 || recorded.shape[0] != rows) {
      return absl::InvalidArgumentError(absl::StrCat(recorded.name, " is ", recorded.ToString(), ", I64[", rows, ", chosen] was expected"));
    }
    const int64_t width = recorded.shape[1];
    const auto* values = static_cast<const int64_t*>(recorded.data);
    std::vector<int64_t>& own = kept.emplace_back();
    for (size_t row = 0; row < batch.layout.rows.size(); ++row) {
      for (const int64_t place : batch.layout.rows[row].places) {
        const int64_t* begin = values + (static_cast<int64_t>(row) * batch.layout.columns + place) * width;
        own.insert(own.end(), begin, begin + width);
        std::sort(own.end() - width, own.end());
      }
    }
    const std::string layer = recorded.name.substr(prefix.size(), recorded.name.size() - prefix.size() - std::string(".indices").size());
    tensors.push_back({absl::StrCat("router.", layer, ".indices"), StoredType::kI64, {static_cast<int64_t>(own.size()) / width, width}, nullptr});
  }
  if (tensors.empty()) return absl::InvalidArgumentError(absl::StrCat(batch_case, " has no recorded router choices to pin"));
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].data = kept[i].data();
  return WriteSafetensors(path, tensors).status();
}

}  // namespace moonpipe
