#include "moonpipe/spec/weight_layout.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "moonpipe/base/nearest_name.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

constexpr size_t kMostListed = 1000;
constexpr int64_t kValuesPerWord = 8;

constexpr absl::string_view kNested = "language_model.model.";
constexpr absl::string_view kNestedHead = "language_model.lm_head.weight";
constexpr absl::string_view kBlocks = "vision_tower.encoder.blocks.";

using Triple = std::array<absl::string_view, 3>;
constexpr Triple kSplitQkv[] = {{"wq", "wk", "wv"}, {"q_proj", "k_proj", "v_proj"}, {"attn.q_proj", "attn.k_proj", "attn.v_proj"}};
constexpr Triple kStackedExperts[] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
constexpr absl::string_view kFusedGateUp = "gate_up_proj";
constexpr Triple kExpertMatrices = {"gate_proj", "up_proj", "down_proj"};
constexpr std::pair<absl::string_view, absl::string_view> kProjectorLinears[] = {
    {"linear_1.", "linear_2."}, {"proj.0.", "proj.2."}, {"in_proj.", "out_proj."}};
constexpr absl::string_view kProjectors[] = {"multi_modal_projector.", "mm_projector."};

// In what the folder's names differ from the canonical ones.
struct Spelling {
  bool native = false;
  std::string projector;  // prefix with what stands before it; empty: canonical
  const std::pair<absl::string_view, absl::string_view>* linears = nullptr;
  const Triple* qkv = nullptr;      // null: one matrix
  const Triple* stacks = nullptr;   // null: one by one
  bool fused_gate_up = false;       // stacked, gate and up in one
  std::string stack_suffix;         // "" or ".weight"
};

Spelling DetectSpelling(const std::vector<std::string>& names) {
  Spelling spelling;
  for (const std::string& full : names) {
    absl::string_view name = full;
    if (absl::StartsWith(name, "model.language_model.") || absl::StartsWith(name, "model.vision_tower.")) spelling.native = true;
    absl::string_view bare = name;
    absl::ConsumePrefix(&bare, "model.");
    for (const absl::string_view projector : kProjectors) {
      if (!absl::StartsWith(bare, projector)) continue;
      spelling.projector = std::string(full.substr(0, full.size() - bare.size() + projector.size()));
      bare.remove_prefix(projector.size());
      for (const auto& linears : kProjectorLinears) {
        if (absl::StartsWith(bare, linears.first)) spelling.linears = &linears;
      }
    }
    if (absl::StrContains(name, "vision_tower.")) {
      for (const Triple& split : kSplitQkv) {
        // Of a block, not the tail of a longer name.
        if (!absl::EndsWith(name, absl::StrCat(".", split[0], ".weight"))) continue;
        const absl::string_view before = name.substr(0, name.size() - split[0].size() - 8);
        if (!before.empty() && absl::ascii_isdigit(static_cast<unsigned char>(before.back()))) spelling.qkv = &split;
      }
    }
    if (const size_t at = name.find(".mlp.experts."); at != absl::string_view::npos) {
      absl::string_view leaf = name.substr(at + 13);
      const bool weight = absl::ConsumeSuffix(&leaf, ".weight");
      const Triple* found = leaf == kFusedGateUp ? &kStackedExperts[0] : nullptr;
      for (const Triple& stacked : kStackedExperts) {
        if (leaf == stacked[0]) found = &stacked;
      }
      if (found != nullptr) {
        spelling.stacks = found;
        spelling.fused_gate_up = leaf == kFusedGateUp;
        spelling.stack_suffix = weight ? ".weight" : "";
      }
    }
  }
  return spelling;
}

// One canonical name as the folder spells it, experts and QKV apart.
std::string Spell(const Spelling& spelling, absl::string_view name) {
  for (const absl::string_view projector : kProjectors) {
    absl::string_view rest = name;
    if (spelling.projector.empty() || !absl::ConsumePrefix(&rest, projector)) continue;
    for (const auto& linears : kProjectorLinears) {
      if (spelling.linears == nullptr) break;
      if (absl::ConsumePrefix(&rest, linears.first)) return absl::StrCat(spelling.projector, spelling.linears->first, rest);
      if (absl::ConsumePrefix(&rest, linears.second)) return absl::StrCat(spelling.projector, spelling.linears->second, rest);
    }
    return absl::StrCat(spelling.projector, rest);
  }
  if (!spelling.native) return std::string(name);
  absl::string_view rest = name;
  if (rest == kNestedHead) return "lm_head.weight";
  if (absl::ConsumePrefix(&rest, kNested)) return absl::StrCat("model.language_model.", rest);
  if (absl::ConsumePrefix(&rest, kBlocks)) {
    const size_t dot = rest.find('.');
    const absl::string_view number = rest.substr(0, dot);
    std::string leaf(rest.substr(dot + 1));
    // The new names overlap the old ones, so that each is renamed once and from the old name.
    constexpr std::pair<absl::string_view, absl::string_view> kRenames[] = {
        {"norm0.", "norm1."}, {"norm1.", "norm2."}, {"mlp.fc0.", "mlp.fc1."}, {"mlp.fc1.", "mlp.fc2."}, {"wo.", "attn.proj."}};
    for (const auto& [from, to] : kRenames) {
      if (!absl::StartsWith(leaf, from)) continue;
      leaf = absl::StrCat(to, leaf.substr(from.size()));
      break;
    }
    return absl::StrCat("model.vision_tower.layers.", number, ".", leaf);
  }
  if (name == "vision_tower.patch_embed.pos_emb.weight") return "model.vision_tower.patch_embed.pos_emb.position_embeddings";
  rest = name;
  if (absl::ConsumePrefix(&rest, "vision_tower.encoder.")) return absl::StrCat("model.vision_tower.", rest);
  if (absl::StartsWith(name, "vision_tower.")) return absl::StrCat("model.", name);
  return std::string(name);
}

StoredWeight Whole(const TensorSpec& spec, std::string name) {
  StoredWeight weight;
  weight.name = std::move(name);
  weight.shape = spec.shape;
  weight.pieces.push_back({spec.name, spec.shape.front(), 0, 0});
  return weight;
}

class LayoutBuilder {
 public:
  LayoutBuilder(const ModelConfig& config, const ModelFolder& folder, Spelling spelling)
      : config_(config), folder_(folder), spelling_(std::move(spelling)) {}

  void Add(const TensorSpec& spec) {
    if (spec.expert >= 0 && spelling_.stacks != nullptr) return AddToStack(spec);
    if (spelling_.qkv != nullptr && absl::StartsWith(spec.name, kBlocks) && absl::StrContains(spec.name, ".wqkv.")) return AddSplitQkv(spec);
    StoredWeight weight = Whole(spec, Spell(spelling_, spec.name));
    if (spec.name == "vision_tower.patch_embed.proj.weight") {
      const std::vector<int64_t> linear = {spec.shape[0], spec.shape[1] * spec.shape[2] * spec.shape[3]};
      const absl::StatusOr<const StoredTensor*> stored = Stored(weight.name);
      if (stored.ok() && (*stored)->shape == linear) weight.shape = linear;
    }
    layout_.push_back(std::move(weight));
  }

  // A tied model needs no head; some writers store it all the same.
  void AddTiedHead() {
    const bool nested = config_.architecture != Architecture::kDeepseekV3;
    const std::string name = Spell(spelling_, nested ? kNestedHead : "lm_head.weight");
    if (!config_.text.tie_word_embeddings || !folder_.Contains(name)) return;
    const auto embedding = std::find_if(layout_.begin(), layout_.end(), [](const StoredWeight& weight) {
      return absl::EndsWith(weight.pieces.front().tensor, "embed_tokens.weight");
    });
    StoredWeight head = *embedding;
    head.name = name;
    head.is_tied_head = true;
    layout_.push_back(std::move(head));
  }

  WeightLayout Release() { return std::move(layout_); }

 private:
  absl::StatusOr<const StoredTensor*> Stored(const std::string& name) const {
    if (!folder_.Contains(name)) return absl::NotFoundError(name);
    return folder_.Find(name);
  }

  void AddToStack(const TensorSpec& spec) {
    const size_t cut = spec.name.find(absl::StrCat(".experts.", spec.expert, "."));
    const std::string prefix = Spell(spelling_, spec.name.substr(0, cut)) + ".experts.";
    absl::string_view leaf = absl::string_view(spec.name).substr(cut + absl::StrCat(".experts.", spec.expert, ".").size());
    absl::ConsumeSuffix(&leaf, ".weight");
    size_t matrix = 0;
    while (kExpertMatrices[matrix] != leaf) ++matrix;
    const bool fused = spelling_.fused_gate_up && matrix < 2;
    const std::string name =
        absl::StrCat(prefix, fused ? kFusedGateUp : (*spelling_.stacks)[matrix], spelling_.stack_suffix);
    const int64_t height = (fused ? 2 : 1) * spec.shape[0];
    const auto [entry, is_new] = stack_of_.try_emplace(name, layout_.size());
    if (is_new) {
      StoredWeight stack;
      stack.name = name;
      stack.shape = {config_.text.n_routed_experts, height, spec.shape[1]};
      layout_.push_back(std::move(stack));
    }
    const int64_t offset = fused && matrix == 1 ? spec.shape[0] : 0;
    layout_[entry->second].pieces.push_back({spec.name, spec.shape[0], 0, spec.expert * height + offset});
  }

  void AddSplitQkv(const TensorSpec& spec) {
    const size_t cut = spec.name.find(".wqkv.");
    const absl::string_view kind = absl::string_view(spec.name).substr(cut + 6);  // weight or bias
    const int64_t width = spec.shape[0] / 3;
    for (size_t part = 0; part < 3; ++part) {
      StoredWeight weight;
      // "x" stands for the leaf while the prefix is spelt.
      const std::string prefix = Spell(spelling_, spec.name.substr(0, cut + 1) + "x");
      weight.name = absl::StrCat(prefix.substr(0, prefix.size() - 1), (*spelling_.qkv)[part], ".", kind);
      weight.shape = spec.shape;
      weight.shape[0] = width;
      if (spelling_.native && part < 2) weight.half_split_head = config_.vision->head_dim();
      weight.pieces.push_back({spec.name, width, static_cast<int64_t>(part) * width, 0});
      layout_.push_back(std::move(weight));
    }
  }

  const ModelConfig& config_;
  const ModelFolder& folder_;
  const Spelling spelling_;
  WeightLayout layout_;
  std::map<std::string, size_t> stack_of_;
};

std::string ShapeText(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

bool IsPlainType(StoredType type) { return type == StoredType::kF32 || type == StoredType::kBF16 || type == StoredType::kF16; }

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Compares the layout with what the folder holds and fills in types and encodings.
class Checker {
 public:
  Checker(const ModelConfig& config, const ModelFolder& folder) : config_(config), folder_(folder) {}

  void Check(StoredWeight& weight) {
    if (!folder_.Contains(weight.name) && folder_.Contains(weight.name + "_packed")) return CheckInt4(weight);
    const StoredTensor* stored = Take(weight.name, weight.shape, weight.pieces.front().tensor);
    if (stored == nullptr) return;
    if (IsPlainType(stored->type)) {
      weight.type = stored->type;
    } else if (stored->type == StoredType::kF8E4M3) {
      CheckFp8(weight);
    } else {
      Misfit(*stored, absl::StrCat("stored as ", StoredTypeName(stored->type), "; F32, BF16 and F16 can be read, F8_E4M3 with its scales"));
    }
  }

  absl::Status Result(const std::string& folder) {
    std::vector<std::string> unknown;
    for (const std::string& name : folder_.Names()) {
      if (expected_.count(name) > 0 || absl::EndsWith(name, "rotary_emb.inv_freq")) continue;
      std::string line = absl::StrCat(name, " ", (*folder_.Find(name))->ToString(), " in ", folder_.FileOf(name));
      // Nearest names are dear over thousands of tensors and only help with the first few.
      if (unknown.size() < 3) {
        const std::vector<std::string> nearest = NearestNames(name, {expected_.begin(), expected_.end()});
        if (!nearest.empty()) absl::StrAppend(&line, " (nearest known: ", nearest.front(), ")");
      }
      unknown.push_back(std::move(line));
    }
    if (missing_.empty() && unknown.empty() && misfit_.empty()) return absl::OkStatus();
    std::string text = absl::StrCat(folder, ": the weights do not fit config.json");
    Describe("missing", missing_, &text);
    Describe("unknown", unknown, &text);
    Describe("of another shape or dtype", misfit_, &text);
    return absl::InvalidArgumentError(text);
  }

 private:
  static void Describe(const std::string& kind, const std::vector<std::string>& items, std::string* text) {
    if (items.empty()) return;
    absl::StrAppend(text, "\n  ", items.size(), " ", kind, ":");
    for (size_t i = 0; i < std::min(items.size(), kMostListed); ++i) absl::StrAppend(text, "\n    ", items[i]);
    if (items.size() > kMostListed) absl::StrAppend(text, "\n    and ", items.size() - kMostListed, " more");
  }

  void Misfit(const StoredTensor& stored, const std::string& reason) {
    misfit_.push_back(absl::StrCat(stored.name, " in ", folder_.FileOf(stored.name), ": ", reason));
  }

  // A stored tensor of the right shape, or null with the reason noted.
  const StoredTensor* Take(const std::string& name, const std::vector<int64_t>& shape, const std::string& canonical = "") {
    expected_.insert(name);
    if (!folder_.Contains(name)) {
      missing_.push_back(absl::StrCat(name, " ", ShapeText(shape), canonical.empty() || canonical == name ? "" : absl::StrCat(" for ", canonical)));
      return nullptr;
    }
    const StoredTensor* stored = *folder_.Find(name);
    if (stored->shape != shape) {
      misfit_.push_back(absl::StrCat(name, ": ", ShapeText(stored->shape), " in ", folder_.FileOf(name), ", ", ShapeText(shape), " by config.json"));
      return nullptr;
    }
    return stored;
  }

  void CheckInt4(StoredWeight& weight) {
    weight.encoding = WeightEncoding::kInt4;
    weight.type = StoredType::kBF16;
    const std::string packed_name = weight.name + "_packed";
    const StoredTensor* named = *folder_.Find(packed_name);
    for (const char* suffix : {"_packed", "_scale", "_shape"}) expected_.insert(weight.name + suffix);
    if (!config_.quantization.has_value() || config_.quantization->method != QuantizationMethod::kInt4) {
      return Misfit(*named, "is packed, but config.json has no quantization_config of 4-bit weights");
    }
    if (weight.shape.size() != 2) return Misfit(*named, "only matrices can be packed");
    const int64_t rows = weight.shape[0], columns = weight.shape[1];
    const StoredTensor* packed = Take(packed_name, {rows, CeilDiv(columns, kValuesPerWord)});
    if (packed != nullptr && packed->type != StoredType::kI32) Misfit(*packed, absl::StrCat("stored as ", StoredTypeName(packed->type), ", not I32"));
    const StoredTensor* scale = Take(weight.name + "_scale", {rows, CeilDiv(columns, config_.quantization->group_size)});
    if (scale != nullptr && !IsPlainType(scale->type)) Misfit(*scale, absl::StrCat("stored as ", StoredTypeName(scale->type), ", not BF16, F16 or F32"));
    const StoredTensor* shape = Take(weight.name + "_shape", {2});
    if (shape == nullptr) return;
    if (shape->type != StoredType::kI32 && shape->type != StoredType::kI64) {
      return Misfit(*shape, absl::StrCat("stored as ", StoredTypeName(shape->type), ", not I32 or I64"));
    }
    std::vector<int64_t> stored_shape;
    for (size_t i = 0; i < 2; ++i) {
      if (shape->type == StoredType::kI32) {
        int32_t value = 0;
        std::memcpy(&value, static_cast<const char*>(shape->data) + 4 * i, 4);
        stored_shape.push_back(value);
      } else {
        int64_t value = 0;
        std::memcpy(&value, static_cast<const char*>(shape->data) + 8 * i, 8);
        stored_shape.push_back(value);
      }
    }
    if (stored_shape != weight.shape) Misfit(*shape, absl::StrCat("says ", ShapeText(stored_shape), ", ", ShapeText(weight.shape), " by config.json"));
  }

  void CheckFp8(StoredWeight& weight) {
    weight.encoding = WeightEncoding::kFp8;
    weight.type = StoredType::kBF16;
    const std::string scale_name = weight.name + "_scale_inv";
    expected_.insert(scale_name);
    const StoredTensor* stored = *folder_.Find(weight.name);
    if (!config_.quantization.has_value() || config_.quantization->method != QuantizationMethod::kFp8) {
      return Misfit(*stored, "is stored as F8_E4M3, but config.json has no quantization_config of FP8 blocks");
    }
    if (weight.shape.size() != 2) return Misfit(*stored, "only matrices can be stored in FP8 blocks");
    const StoredTensor* scale = Take(scale_name, {CeilDiv(weight.shape[0], config_.quantization->block_rows),
                                                  CeilDiv(weight.shape[1], config_.quantization->block_columns)});
    if (scale != nullptr && scale->type != StoredType::kF32 && scale->type != StoredType::kBF16) {
      Misfit(*scale, absl::StrCat("stored as ", StoredTypeName(scale->type), ", not F32 or BF16"));
    }
  }

  const ModelConfig& config_;
  const ModelFolder& folder_;
  std::set<std::string> expected_;
  std::vector<std::string> missing_;
  std::vector<std::string> misfit_;
};

}  // namespace

int64_t StoredWeight::columns() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count / matrix_rows();
}

int64_t StoredWeight::matrix_rows() const {
  int64_t rows = 0;
  for (const WeightPiece& piece : pieces) rows = std::max(rows, piece.stored_row + piece.rows);
  return rows;
}

int64_t StoredRowOf(const StoredWeight& weight, int64_t row) {
  const int64_t width = weight.half_split_head;
  if (width == 0) return row;
  const int64_t head = row / width, within = row % width;
  // Pair j is rows 2j and 2j+1; its halves stand at j and width / 2 + j.
  return head * width + within % 2 * (width / 2) + within / 2;
}

WeightLayout PublishedLayout(const std::vector<TensorSpec>& tensors) {
  WeightLayout layout;
  for (const TensorSpec& spec : tensors) layout.push_back(Whole(spec, spec.name));
  return layout;
}

absl::StatusOr<WeightLayout> DetectLayout(const ModelConfig& config, const ModelFolder& folder) {
  LayoutBuilder builder(config, folder, DetectSpelling(folder.Names()));
  for (const TensorSpec& spec : ListTensors(config)) builder.Add(spec);
  builder.AddTiedHead();
  WeightLayout layout = builder.Release();
  Checker checker(config, folder);
  for (StoredWeight& weight : layout) checker.Check(weight);
  MOONPIPE_RETURN_IF_ERROR(checker.Result(folder.path()));
  return layout;
}

}  // namespace moonpipe
