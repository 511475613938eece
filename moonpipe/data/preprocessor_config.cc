#include "moonpipe/data/preprocessor_config.h"

#include <filesystem>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using Json = nlohmann::json;

constexpr char kFileName[] = "preprocessor_config.json";

// One object of the file; what is wrong with it is collected by path.
class Fields {
 public:
  Fields(const Json& object, std::string prefix, std::vector<std::string>* problems)
      : object_(object), prefix_(std::move(prefix)), problems_(*problems) {}

  void Problem(const std::string& name, const std::string& reason) const { problems_.push_back(absl::StrCat(prefix_, name, ": ", reason)); }

  // Null counts as absent.
  const Json* Find(const std::string& name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  const Json* Required(const std::string& name) const {
    const Json* value = Find(name);
    if (value == nullptr) Problem(name, "is missing; it has no default");
    return value;
  }

  std::optional<int32_t> OptionalCount(const std::string& name) const {
    const Json* value = Find(name);
    return value == nullptr ? std::nullopt : std::optional<int32_t>(ToCount(*value, name));
  }
  int32_t Count(const std::string& name) const {
    const Json* value = Required(name);
    return value == nullptr ? 1 : ToCount(*value, name);
  }

  bool BoolOr(const std::string& name, bool fallback) const {
    const Json* value = Find(name);
    if (value == nullptr) return fallback;
    if (value->is_boolean()) return value->get<bool>();
    Problem(name, absl::StrCat("must be true or false, is ", value->dump()));
    return fallback;
  }

  std::string StringOr(const std::string& name, const std::string& fallback) const {
    const Json* value = Find(name);
    if (value == nullptr) return fallback;
    if (value->is_string()) return value->get<std::string>();
    Problem(name, absl::StrCat("must be a string, is ", value->dump()));
    return fallback;
  }

  double Positive(const std::string& name) const {
    const Json* value = Required(name);
    if (value == nullptr) return 1;
    if (value->is_number() && value->get<double>() > 0) return value->get<double>();
    Problem(name, absl::StrCat("must be a number above 0, is ", value->dump()));
    return 1;
  }

  // One number, or two equal ones.
  int32_t Merge() const {
    const std::string name = "merge_kernel_size";
    const Json* value = Required(name);
    if (value == nullptr) return 1;
    if (!value->is_array()) return ToCount(*value, name);
    if (value->size() == 2 && (*value)[0] == (*value)[1]) return ToCount((*value)[0], name);
    Problem(name, absl::StrCat("must be one whole number or two equal ones, is ", value->dump()));
    return 1;
  }

  void Halves(const std::string& name) const {
    const Json* value = Required(name);
    if (value == nullptr) return;
    bool halves = value->is_array() && value->size() == 3;
    for (size_t i = 0; halves && i < 3; ++i) halves = (*value)[i].is_number() && (*value)[i].get<double>() == 0.5;
    if (!halves) Problem(name, absl::StrCat(value->dump(), " is not supported: the tower normalises each channel with 0.5; only [0.5,0.5,0.5] is"));
  }

  uint8_t LevelOr(const std::string& name, uint8_t fallback) const {
    const Json* value = Find(name);
    if (value == nullptr) return fallback;
    if (value->is_number_integer() && value->get<int64_t>() >= 0 && value->get<int64_t>() <= 255) return value->get<uint8_t>();
    Problem(name, absl::StrCat("must be a whole number from 0 to 255, is ", value->dump()));
    return fallback;
  }

 private:
  int32_t ToCount(const Json& value, const std::string& name) const {
    constexpr int64_t most = std::numeric_limits<int32_t>::max() / 1024;  // room for the products with a patch's side
    if (value.is_number_integer() && value.get<int64_t>() >= 1 && value.get<int64_t>() <= most) return value.get<int32_t>();
    Problem(name, absl::StrCat("must be a whole number from 1 to ", most, ", is ", value.dump()));
    return 1;
  }

  const Json& object_;
  const std::string prefix_;
  std::vector<std::string>& problems_;
};

std::optional<PictureBackground> ReadBackground(const Fields& fields, const std::string& prefix, std::vector<std::string>* problems) {
  const Json* object = fields.Find("transparent_bg_config");
  if (object == nullptr) return std::nullopt;
  if (!object->is_object()) {
    fields.Problem("transparent_bg_config", absl::StrCat("must be an object, is ", object->dump()));
    return std::nullopt;
  }
  const Fields config(*object, absl::StrCat(prefix, "transparent_bg_config."), problems);
  using Pattern = PictureBackground::Pattern;
  PictureBackground background;
  const std::string pattern = config.StringOr("pattern", "black");
  const std::pair<const char*, Pattern> patterns[] = {
      {"white", Pattern::kWhite}, {"black", Pattern::kBlack}, {"gray", Pattern::kGrey}, {"chessboard", Pattern::kChessboard}};
  bool known = false;
  for (const auto& [name, value] : patterns) {
    if (pattern != name) continue;
    background.pattern = value;
    known = true;
  }
  if (!known) config.Problem("pattern", absl::StrCat("must be white, black, gray or chessboard, is \"", pattern, "\""));
  background.square_size = config.OptionalCount("chessboard_square_size").value_or(background.square_size);
  background.white_first = config.BoolOr("chessboard_square_on_top_left", background.white_first);
  background.white_value = config.LevelOr("chessboard_white_value", background.white_value);
  background.grey_value = config.LevelOr("chessboard_gray_value", background.grey_value);
  const std::string stage = fields.StringOr("transparent_bg_fill_stage", "before_resize");
  if (stage != "before_resize") {
    fields.Problem("transparent_bg_fill_stage", absl::StrCat("\"", stage, "\" is not supported; only \"before_resize\" is"));
  }
  return background;
}

TimestampMode ReadTimestampMode(const Fields& fields) {
  const std::string mode = fields.StringOr("timestamp_mode", "hh:mm:ss.fff");
  if (mode == "mm:ss.fff") return TimestampMode::kMinutesMillis;
  if (mode == "mm:ss") return TimestampMode::kMinutes;
  if (mode != "hh:mm:ss.fff") fields.Problem("timestamp_mode", absl::StrCat("must be hh:mm:ss.fff, mm:ss.fff or mm:ss, is \"", mode, "\""));
  return TimestampMode::kHoursMillis;
}

std::string FormPrefix(Architecture architecture) { return architecture == Architecture::kKimiVl ? "" : "media_proc_cfg."; }

absl::Status CheckAgainstModel(const PictureRule& rule, const ModelConfig& model) {
  const VisionConfig& vision = *model.vision;
  const std::string prefix = FormPrefix(model.architecture);
  const auto differ = [&](const char* ours, int64_t value, const char* theirs, int64_t other) {
    return absl::InvalidArgumentError(absl::StrCat(prefix, ours, " is ", value, ", but the model's vision_config.", theirs, " is ", other));
  };
  if (rule.patch_size != vision.patch_size) return differ("patch_size", rule.patch_size, "patch_size", vision.patch_size);
  if (rule.merge != vision.merge_height) return differ("merge_kernel_size", rule.merge, "merge_kernel_size", vision.merge_height);
  if (rule.merge != vision.merge_width) return differ("merge_kernel_size", rule.merge, "merge_kernel_size", vision.merge_width);
  if (rule.clips.has_value() && rule.clips->frames_per_clip > vision.init_pos_emb_time) {
    return differ("temporal_merge_kernel_size", rule.clips->frames_per_clip, "init_pos_emb_time", vision.init_pos_emb_time);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PictureRule> ParsePreprocessorConfig(absl::string_view json, Architecture architecture) {
  const Json root = Json::parse(json.begin(), json.end(), nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return absl::InvalidArgumentError("preprocessor configuration: the file must hold one JSON object");
  std::vector<std::string> problems;
  PictureRule rule;
  const std::string prefix = FormPrefix(architecture);
  const Json* object = &root;
  if (!prefix.empty()) {
    const auto found = root.find("media_proc_cfg");
    if (found == root.end() || !found->is_object()) {
      return absl::InvalidArgumentError("preprocessor configuration: media_proc_cfg: must be an object; K2.5's limits stand there");
    }
    object = &*found;
  }
  const Fields fields(*object, prefix, &problems);
  rule.patch_size = fields.Count("patch_size");
  rule.merge = fields.Merge();
  fields.Halves("image_mean");
  fields.Halves("image_std");
  if (architecture == Architecture::kKimiVl) {
    rule.size_rule = SizeRule::kInTokenLimit;
    rule.max_patches = fields.Count("in_token_limit");
    rule.pad = fields.BoolOr("pad_input", true);
  } else {
    rule.size_rule = SizeRule::kPatchLimits;
    rule.max_patches = fields.Count("in_patch_limit");
    rule.max_side_patches = fields.Count("patch_limit_on_one_side");
    rule.fixed_positions = fields.OptionalCount("fixed_output_tokens");
    ClipRule clips;
    clips.max_patches_each_frame = fields.Count("in_patch_limit_each_frame");
    clips.max_patches_video = fields.OptionalCount("in_patch_limit_video");
    clips.sample_fps = fields.Positive("sample_fps");
    clips.max_frames = fields.OptionalCount("max_num_frames_each_video");
    clips.frames_per_clip = fields.Count("temporal_merge_kernel_size");
    clips.timestamps = ReadTimestampMode(fields);
    rule.clips = clips;
  }
  rule.background = ReadBackground(fields, prefix, &problems);
  if (problems.empty()) return rule;
  return absl::InvalidArgumentError(absl::StrCat("preprocessor configuration: ", problems.size(), problems.size() == 1 ? " problem" : " problems",
                                                 "\n  ", absl::StrJoin(problems, "\n  ")));
}

absl::StatusOr<PictureRule> ResolvePictureRule(const ModelConfig& model, const std::vector<std::string>& folders,
                                               std::optional<uint32_t> max_patches) {
  PictureRule rule;
  if (!model.vision.has_value()) return rule;
  std::string path;
  for (const std::string& folder : folders) {
    const std::string candidate = (std::filesystem::path(folder) / kFileName).string();
    std::error_code ignored;
    if (folder.empty() || !std::filesystem::exists(candidate, ignored)) continue;
    path = candidate;
    break;
  }
  if (path.empty()) {
    if (!max_patches.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat("no patch limit for pictures: there is no ", kFileName, " in ", absl::StrJoin(folders, " or "),
                                                     ", and data.max_patches is not set; copy the checkpoint's file there or set the field"));
    }
    rule.patch_size = static_cast<int32_t>(model.vision->patch_size);
    rule.merge = static_cast<int32_t>(model.vision->merge_height);
    rule.size_rule = model.architecture == Architecture::kKimiVl ? SizeRule::kInTokenLimit : SizeRule::kPatchLimits;
  } else {
    MOONPIPE_ASSIGN_OR_RETURN(const std::string json, ReadFile(path));
    absl::StatusOr<PictureRule> parsed = ParsePreprocessorConfig(json, model.architecture);
    if (!parsed.ok()) return Annotate(parsed.status(), path);
    if (absl::Status agrees = CheckAgainstModel(*parsed, model); !agrees.ok()) return Annotate(agrees, path);
    rule = *std::move(parsed);
  }
  if (max_patches.has_value()) rule.max_patches = static_cast<int32_t>(*max_patches);
  rule.patch_order = model.vision->patch_order;
  MP_LOG(INFO) << "pictures: at most " << rule.max_patches << " patches before padding, "
               << (path.empty() ? std::string("by data.max_patches") : absl::StrCat("by ", path, max_patches.has_value() ? " and data.max_patches" : ""));
  return rule;
}

}  // namespace moonpipe
