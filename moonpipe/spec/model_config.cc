#include "moonpipe/spec/model_config.h"

#include <algorithm>
#include <limits>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using Json = nlohmann::json;

// Collects what is wrong with the whole file, so that a person mends it in one go.
class Problems {
 public:
  void Add(const std::string& path, const std::string& reason) { lines_.push_back(absl::StrCat(path, ": ", reason)); }
  bool empty() const { return lines_.empty(); }
  absl::Status ToStatus() const {
    return absl::InvalidArgumentError(absl::StrCat("model configuration: ", lines_.size(), lines_.size() == 1 ? " problem" : " problems",
                                                   "\n  ", absl::StrJoin(lines_, "\n  ")));
  }

 private:
  std::vector<std::string> lines_;
};

// One object of the file. Every reader reports under the field's path and returns a harmless value on failure.
class Fields {
 public:
  Fields(const Json& object, std::string prefix, Problems* problems)
      : object_(object), prefix_(std::move(prefix)), problems_(*problems) {}

  std::string Path(const std::string& name) const { return prefix_.empty() ? name : absl::StrCat(prefix_, ".", name); }
  void Problem(const std::string& name, const std::string& reason) const { problems_.Add(Path(name), reason); }

  // Null counts as absent: published files write null for "none".
  const Json* Find(const std::string& name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  bool Has(const std::string& name) const { return Find(name) != nullptr; }

  int64_t Integer(const std::string& name, int64_t least) const {
    const Json* value = Required(name);
    return value == nullptr ? least : ToInteger(*value, name, least, least);
  }
  int64_t IntegerOr(const std::string& name, int64_t least, int64_t fallback) const {
    const Json* value = Find(name);
    return value == nullptr ? fallback : ToInteger(*value, name, least, fallback);
  }
  std::optional<int64_t> OptionalInteger(const std::string& name, int64_t least) const {
    const Json* value = Find(name);
    if (value == nullptr) return std::nullopt;
    return ToInteger(*value, name, least, least);
  }

  double Positive(const std::string& name) const {
    const Json* value = Required(name);
    return value == nullptr ? 1 : ToPositive(*value, name);
  }
  double PositiveOr(const std::string& name, double fallback) const {
    const Json* value = Find(name);
    return value == nullptr ? fallback : ToPositive(*value, name);
  }

  bool BoolOr(const std::string& name, bool fallback) const {
    const Json* value = Find(name);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) {
      Problem(name, absl::StrCat("must be true or false, is ", value->dump()));
      return fallback;
    }
    return value->get<bool>();
  }

  std::string StringOr(const std::string& name, const std::string& fallback) const {
    const Json* value = Find(name);
    if (value == nullptr) return fallback;
    if (!value->is_string()) {
      Problem(name, absl::StrCat("must be a string, is ", value->dump()));
      return fallback;
    }
    return value->get<std::string>();
  }
  std::string String(const std::string& name) const { return Required(name) == nullptr ? "" : StringOr(name, ""); }

  // Refuses every value but `supported`; an absent field passes.
  void Only(const std::string& name, const Json& supported, const std::string& reason) const {
    const Json* value = Find(name);
    if (value != nullptr && *value != supported) {
      Problem(name, absl::StrCat(value->dump(), " is not supported: ", reason, "; only ", supported.dump(), " is"));
    }
  }

  // A nested object, or null with a problem.
  const Json* Object(const std::string& name) const {
    const Json* value = Required(name);
    if (value == nullptr) return nullptr;
    if (value->is_object()) return value;
    Problem(name, absl::StrCat("must be an object, is ", value->dump()));
    return nullptr;
  }

 private:
  const Json* Required(const std::string& name) const {
    const Json* value = Find(name);
    if (value == nullptr) Problem(name, "is missing; it has no default");
    return value;
  }

  int64_t ToInteger(const Json& value, const std::string& name, int64_t least, int64_t fallback) const {
    if (!value.is_number_integer()) {
      Problem(name, absl::StrCat("must be a whole number, is ", value.dump()));
      return fallback;
    }
    const int64_t number = value.get<int64_t>();
    if (number < least) {
      Problem(name, absl::StrCat("must be at least ", least, ", is ", number));
      return fallback;
    }
    return number;
  }

  double ToPositive(const Json& value, const std::string& name) const {
    if (!value.is_number() || !(value.get<double>() > 0)) {
      Problem(name, absl::StrCat("must be a number above 0, is ", value.dump()));
      return 1;
    }
    return value.get<double>();
  }

  const Json& object_;
  const std::string prefix_;
  Problems& problems_;
};

// Newer configuration classes write a dictionary of type "default" where the published file has null: both mean no scaling.
std::optional<RopeScaling> ReadRopeScaling(const Fields& text, Problems* problems) {
  const std::string field = text.Has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  if (!text.Has(field)) return std::nullopt;
  const Json* object = text.Object(field);
  if (object == nullptr) return std::nullopt;
  const Fields scaling(*object, text.Path(field), problems);
  const std::string type_name = scaling.Has("rope_type") ? "rope_type" : "type";
  const std::string type = scaling.StringOr(type_name, "default");
  if (type == "default") return std::nullopt;
  if (type != "yarn") {
    scaling.Problem(type_name, absl::StrCat("\"", type, "\" is not supported: only null, \"default\" and \"yarn\" are"));
    return std::nullopt;
  }
  RopeScaling yarn;
  yarn.factor = scaling.Positive("factor");
  yarn.beta_fast = scaling.PositiveOr("beta_fast", yarn.beta_fast);
  yarn.beta_slow = scaling.PositiveOr("beta_slow", yarn.beta_slow);
  yarn.mscale = scaling.PositiveOr("mscale", yarn.mscale);
  yarn.mscale_all_dim = scaling.PositiveOr("mscale_all_dim", yarn.mscale_all_dim);
  yarn.original_max_position_embeddings = scaling.Integer("original_max_position_embeddings", 1);
  if (yarn.mscale != yarn.mscale_all_dim) {
    scaling.Problem("mscale", absl::StrCat(yarn.mscale, " differs from mscale_all_dim ", yarn.mscale_all_dim,
                                           ": scaled cosines are not supported; they must be equal"));
  }
  return yarn;
}

double ReadRopeTheta(const Fields& text, Problems* problems) {
  if (!text.Has("rope_theta") && text.Has("rope_parameters")) {
    const Json* object = text.Object("rope_parameters");
    if (object != nullptr) return Fields(*object, text.Path("rope_parameters"), problems).Positive("rope_theta");
  }
  return text.Positive("rope_theta");
}

// `sigmoid_by_class`: the configuration class that wrote the file knows no other scores and has no field for them.
TextConfig ReadText(const Fields& text, Problems* problems, bool sigmoid_by_class = false) {
  TextConfig config;
  config.vocab_size = text.Integer("vocab_size", 1);
  config.hidden_size = text.Integer("hidden_size", 1);
  config.num_hidden_layers = text.Integer("num_hidden_layers", 1);
  config.num_attention_heads = text.Integer("num_attention_heads", 1);
  config.q_lora_rank = text.OptionalInteger("q_lora_rank", 1);
  config.kv_lora_rank = text.Integer("kv_lora_rank", 1);
  config.qk_nope_head_dim = text.Integer("qk_nope_head_dim", 1);
  config.qk_rope_head_dim = text.Integer("qk_rope_head_dim", 2);
  config.v_head_dim = text.Integer("v_head_dim", 1);
  config.intermediate_size = text.Integer("intermediate_size", 1);
  config.moe_intermediate_size = text.Integer("moe_intermediate_size", 1);
  config.n_routed_experts = text.Integer("n_routed_experts", 1);
  config.num_experts_per_tok = text.Integer("num_experts_per_tok", 1);
  config.n_shared_experts = text.Integer("n_shared_experts", 0);
  config.n_group = text.IntegerOr("n_group", 1, 1);
  config.topk_group = text.IntegerOr("topk_group", 1, 1);
  config.norm_topk_prob = text.BoolOr("norm_topk_prob", true);
  config.routed_scaling_factor = text.Positive("routed_scaling_factor");
  config.scoring_func = sigmoid_by_class ? text.StringOr("scoring_func", "sigmoid") : text.String("scoring_func");
  config.first_k_dense_replace = text.Integer("first_k_dense_replace", 0);
  config.moe_layer_freq = text.IntegerOr("moe_layer_freq", 1, 1);
  config.rms_norm_eps = text.Positive("rms_norm_eps");
  config.rope_theta = ReadRopeTheta(text, problems);
  config.rope_scaling = ReadRopeScaling(text, problems);
  config.max_position_embeddings = text.Integer("max_position_embeddings", 1);
  config.tie_word_embeddings = text.BoolOr("tie_word_embeddings", false);

  text.Only("scoring_func", "sigmoid", "experts are scored by sigmoids");
  text.Only("topk_method", "noaux_tc", "experts are chosen by biased scores");
  text.Only("hidden_act", "silu", "the feed-forward blocks are gated by SiLU");
  text.Only("attention_bias", false, "the published attention has no biases");
  text.Only("attention_dropout", 0.0, "there is no dropout");
  text.Only("num_nextn_predict_layers", 0, "layers that predict further tokens are not trained");
  text.Only("num_key_value_heads", config.num_attention_heads, "latent attention has a key head for every query head");

  if (config.qk_rope_head_dim % 2 != 0) text.Problem("qk_rope_head_dim", absl::StrCat(config.qk_rope_head_dim, " is odd: rotary pairs need an even width"));
  if (config.v_head_dim > config.qk_head_dim()) {
    text.Problem("v_head_dim", absl::StrCat(config.v_head_dim, " exceeds qk_nope_head_dim + qk_rope_head_dim = ", config.qk_head_dim()));
  }
  if (config.num_experts_per_tok > config.n_routed_experts) {
    text.Problem("num_experts_per_tok", absl::StrCat(config.num_experts_per_tok, " exceeds n_routed_experts ", config.n_routed_experts));
  }
  if (config.n_routed_experts % config.n_group != 0) {
    text.Problem("n_group", absl::StrCat(config.n_group, " does not divide n_routed_experts ", config.n_routed_experts));
  } else if (config.n_group > 1 && config.n_routed_experts / config.n_group < 2) {
    text.Problem("n_group", absl::StrCat(config.n_group, " leaves less than two experts a group; a group is scored by its best two"));
  } else if (config.topk_group > config.n_group) {
    text.Problem("topk_group", absl::StrCat(config.topk_group, " exceeds n_group ", config.n_group));
  } else if (config.n_routed_experts / config.n_group * config.topk_group < config.num_experts_per_tok) {
    text.Problem("topk_group", absl::StrCat(config.topk_group, " groups hold fewer experts than num_experts_per_tok ", config.num_experts_per_tok));
  }
  return config;
}

// One group of config_groups.
void ReadPackedGroup(const Fields& group, Problems* problems, Quantization* quantization) {
  group.Only("input_activations", nullptr, "only weights are quantised");
  group.Only("output_activations", nullptr, "only weights are quantised");
  const Json* object = group.Object("weights");
  if (object == nullptr) return;
  const Fields weights(*object, group.Path("weights"), problems);
  if (weights.Integer("num_bits", 1) != 4) weights.Problem("num_bits", "only 4 bits are supported");
  weights.Only("type", "int", "integers are packed");
  weights.Only("symmetric", true, "there are no zero points");
  weights.Only("strategy", "group", "a scale belongs to a group of a row");
  weights.Only("actorder", nullptr, "columns stand in their own order");
  quantization->group_size = weights.Integer("group_size", 1);
}

std::optional<Quantization> ReadQuantization(const Fields& parent, Problems* problems) {
  if (!parent.Has("quantization_config")) return std::nullopt;
  const Json* object = parent.Object("quantization_config");
  if (object == nullptr) return std::nullopt;
  const Fields fields(*object, parent.Path("quantization_config"), problems);
  Quantization quantization;
  const std::string method = fields.String("quant_method");
  if (method == "fp8") {
    quantization.method = QuantizationMethod::kFp8;
    fields.Only("fmt", "e4m3", "one FP8 format can be read");
    const Json* block = fields.Find("weight_block_size");
    if (block == nullptr || !block->is_array() || block->size() != 2 || !(*block)[0].is_number_unsigned() || !(*block)[1].is_number_unsigned() ||
        (*block)[0] == 0 || (*block)[1] == 0) {
      fields.Problem("weight_block_size", absl::StrCat("must be two whole numbers above 0, is ", block == nullptr ? "missing" : block->dump()));
    } else {
      quantization.block_rows = (*block)[0].get<int64_t>();
      quantization.block_columns = (*block)[1].get<int64_t>();
    }
    return quantization;
  }
  if (method != "compressed-tensors") {
    if (!method.empty()) fields.Problem("quant_method", absl::StrCat("\"", method, "\" is not supported; compressed-tensors and fp8 are"));
    return quantization;
  }
  if (fields.String("format") != "pack-quantized") fields.Problem("format", "only \"pack-quantized\" is supported");
  fields.Only("kv_cache_scheme", nullptr, "only weights are quantised");
  const Json* groups = fields.Object("config_groups");
  if (groups == nullptr) return quantization;
  if (groups->size() != 1 || !groups->begin()->is_object()) {
    fields.Problem("config_groups", absl::StrCat("must have one group, has ", groups->size()));
    return quantization;
  }
  ReadPackedGroup(Fields(*groups->begin(), absl::StrCat(fields.Path("config_groups"), ".", groups->begin().key()), problems), problems, &quantization);
  return quantization;
}

// K2.5 writes the same sizes under names that begin with vt_.
// A file that transformers 5 wrote has the plain names.
VisionConfig ReadVision(const Fields& vision, bool clips, int64_t text_hidden_size) {
  const std::string prefix = clips && !vision.Has("hidden_size") ? "vt_" : "";
  const std::string table = vision.Has("pos_emb_height") ? "pos_emb_" : "init_pos_emb_";
  VisionConfig config;
  config.patch_size = vision.Integer("patch_size", 1);
  config.init_pos_emb_height = vision.Integer(table + "height", 1);
  config.init_pos_emb_width = vision.Integer(table + "width", 1);
  config.init_pos_emb_time = clips ? vision.IntegerOr(table + "time", 1, 4) : 1;
  config.num_attention_heads = vision.Integer(prefix + "num_attention_heads", 1);
  config.num_hidden_layers = vision.Integer(prefix + "num_hidden_layers", 1);
  config.hidden_size = vision.Integer(prefix + "hidden_size", 1);
  config.intermediate_size = vision.Integer(prefix + "intermediate_size", 1);
  config.merge_height = config.merge_width = 1;
  const Json* merge = vision.Find("merge_kernel_size");
  if (merge == nullptr) {
    vision.Problem("merge_kernel_size", "is missing; it has no default");
  } else if (!merge->is_array() || merge->size() != 2 || !(*merge)[0].is_number_integer() || !(*merge)[1].is_number_integer() ||
             (*merge)[0].get<int64_t>() < 1 || (*merge)[1].get<int64_t>() < 1) {
    vision.Problem("merge_kernel_size", absl::StrCat("must be exactly two whole numbers above 0, is ", merge->dump()));
  } else {
    config.merge_height = (*merge)[0].get<int64_t>();
    config.merge_width = (*merge)[1].get<int64_t>();
  }
  const std::string order = vision.StringOr("patch_order", "raster");
  if (const std::optional<PatchOrder> parsed = ParsePatchOrder(order); parsed.has_value()) {
    config.patch_order = *parsed;
  } else {
    vision.Problem("patch_order", absl::StrCat("must be raster or block, is \"", order, "\""));
  }
  if (config.hidden_size % config.num_attention_heads != 0 || config.head_dim() % 4 != 0) {
    vision.Problem(prefix + "hidden_size", absl::StrCat(config.hidden_size, " over ", config.num_attention_heads,
                                                        " heads must give a head width that is a multiple of 4: two axes of rotary pairs"));
  }
  if (clips) {
    vision.Only("pos_emb_type", "divided_fixed", "frames get fixed sine embeddings");
    vision.Only("merge_type", "sd2_tpool", "frames of a clip are averaged");
    vision.Only("video_attn_type", "spatial_temporal", "a clip attends over all its frames");
    vision.Only("mm_projector_type", "patchmerger", "the projector is the patch merger");
    vision.Only("projector_hidden_act", "gelu", "the projector's activation is GELU");
    vision.Only("mm_hidden_size", config.hidden_size, "the projector takes the tower's width");
    vision.Only("text_hidden_size", text_hidden_size, "the projector gives the decoder's width");
  }
  return config;
}

// Rotary positions by row, column and time count feature rows, whose patches must stand together; the decoder has none such at all.
void RefuseMultiAxisRotary(const Fields& text, const std::optional<VisionConfig>& vision, Problems* problems) {
  for (const std::string field : {"rope_scaling", "rope_parameters"}) {
    const Json* object = text.Find(field);
    if (object == nullptr || !object->is_object()) continue;
    const Fields scaling(*object, text.Path(field), problems);
    const Json* sections = scaling.Find("mrope_section");
    if (sections == nullptr) continue;
    const bool raster = vision.has_value() && vision->patch_order == PatchOrder::kRaster;
    scaling.Problem("mrope_section", raster ? absl::StrCat(sections->dump(), ": rotary positions of several axes contradict vision_config.patch_order "
                                                                            "\"raster\"; they need \"block\"")
                                            : absl::StrCat(sections->dump(), " is not supported: the decoder's rotary positions have one axis"));
  }
}

// Features of several tower layers, which none of these models has. An empty list is refused too: it tells of another model's class.
void RefuseDeepstack(const Json& object, const std::string& prefix, Problems* problems) {
  for (const auto& [name, value] : object.items()) {
    const std::string path = prefix.empty() ? name : absl::StrCat(prefix, ".", name);
    if (name.find("deepstack") != std::string::npos) {
      problems->Add(path, "is not supported: features enter the decoder at its embeddings only");
    } else if (value.is_object()) {
      RefuseDeepstack(value, path, problems);
    }
  }
}

int64_t ReadToken(const Fields& fields, const std::string& name, int64_t vocab_size) {
  const Json* value = fields.Find(name);
  // Some files list several end tokens; the first is the configured one.
  if (value != nullptr && value->is_array() && !value->empty()) value = &(*value)[0];
  if (value == nullptr || !value->is_number_integer() || value->get<int64_t>() < 0 || value->get<int64_t>() >= vocab_size) {
    fields.Problem(name, absl::StrCat("must be a token id below vocab_size ", vocab_size, ", is ", value == nullptr ? "missing" : value->dump()));
    return 0;
  }
  return value->get<int64_t>();
}

absl::StatusOr<Json> ParseJson(absl::string_view text) {
  try {
    return Json::parse(text.begin(), text.end());
  } catch (const Json::parse_error& error) {
    const size_t at = std::min(error.byte == 0 ? 0 : error.byte - 1, text.size());
    const absl::string_view before = text.substr(0, at);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t last_break = before.rfind('\n');
    const size_t column = last_break == absl::string_view::npos ? at + 1 : at - last_break;
    const absl::string_view rest = text.substr(at);
    const bool comment = !rest.empty() && (rest[0] == '#' || (rest.size() > 1 && rest[0] == '/' && (rest[1] == '/' || rest[1] == '*')));
    return absl::InvalidArgumentError(absl::StrCat("model configuration: line ", line, ", column ", column, ": ",
                                                   comment ? "comments are not part of JSON; remove this one" : error.what()));
  }
}

}  // namespace

absl::string_view ArchitectureName(Architecture architecture) {
  switch (architecture) {
    case Architecture::kKimiVl:
      return "kimi_vl";
    case Architecture::kDeepseekV3:
      return "deepseek_v3";
    case Architecture::kKimiK25:
      return "kimi_k25";
  }
  return "";
}

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json) {
  MOONPIPE_ASSIGN_OR_RETURN(const Json root, ParseJson(json));
  if (!root.is_object()) return absl::InvalidArgumentError("model configuration: the file must hold one JSON object");

  Problems problems;
  const Fields top(root, "", &problems);
  ModelConfig config;
  config.json = std::string(json);
  const std::string model_type = top.StringOr("model_type", "");
  std::string architecture;
  if (const Json* list = top.Find("architectures"); list != nullptr && list->is_array() && !list->empty() && (*list)[0].is_string()) {
    architecture = (*list)[0].get<std::string>();
  }
  if (architecture == "KimiVLForConditionalGeneration" || (architecture.empty() && model_type == "kimi_vl")) {
    config.architecture = Architecture::kKimiVl;
  } else if (architecture == "DeepseekV3ForCausalLM" || (architecture.empty() && (model_type == "deepseek_v3" || model_type == "kimi_k2"))) {
    config.architecture = Architecture::kDeepseekV3;
  } else if (architecture == "KimiK25ForConditionalGeneration" || (architecture.empty() && model_type == "kimi_k25")) {
    config.architecture = Architecture::kKimiK25;
  } else {
    // Nothing else in the file can be judged without knowing which model it is.
    problems.Add("architectures", absl::StrCat("[\"", architecture, "\"] with model_type \"", model_type,
                                               "\" is not supported; KimiVLForConditionalGeneration, DeepseekV3ForCausalLM and "
                                               "KimiK25ForConditionalGeneration are"));
    return problems.ToStatus();
  }

  config.ignore_index = top.IntegerOr("ignore_index", std::numeric_limits<int32_t>::min(), config.ignore_index);
  RefuseDeepstack(root, "", &problems);
  if (config.architecture == Architecture::kDeepseekV3) {
    config.text = ReadText(top, &problems);
    config.pad_token_id = ReadToken(top, "pad_token_id", config.text.vocab_size);
    config.eos_token_id = ReadToken(top, "eos_token_id", config.text.vocab_size);
    if (top.Has("bos_token_id")) config.bos_token_id = ReadToken(top, "bos_token_id", config.text.vocab_size);
  } else {
    const bool clips = config.architecture == Architecture::kKimiK25;
    const Json* text_object = top.Object("text_config");
    const Json* vision_object = top.Object("vision_config");
    if (text_object != nullptr) {
      const Fields text(*text_object, "text_config", &problems);
      // transformers 5 calls the placeholder's id otherwise, and its class ties embeddings where the model does not.
      const bool native = clips && !top.Has("media_placeholder_token_id") && top.Has("image_token_id");
      config.text = ReadText(text, &problems, native);
      config.quantization = ReadQuantization(text, &problems);
      if (!native) top.Only("tie_word_embeddings", config.text.tie_word_embeddings, "it contradicts text_config.tie_word_embeddings");
      config.media_placeholder_token_id = ReadToken(top, native ? "image_token_id" : "media_placeholder_token_id", config.text.vocab_size);
      // The top level wins: it is what the checkpoint's own processor reads.
      for (auto [name, id] : {std::pair<const char*, int64_t*>{"pad_token_id", &config.pad_token_id}, {"eos_token_id", &config.eos_token_id}}) {
        *id = ReadToken(top.Has(name) ? top : text, name, config.text.vocab_size);
      }
      const Fields& bos = top.Has("bos_token_id") ? top : text;
      if (bos.Has("bos_token_id")) config.bos_token_id = ReadToken(bos, "bos_token_id", config.text.vocab_size);
    }
    if (vision_object != nullptr) {
      const Fields vision(*vision_object, "vision_config", &problems);
      config.vision = ReadVision(vision, clips, config.text.hidden_size);
      config.projector_ln_eps = vision.PositiveOr("projector_ln_eps", top.PositiveOr("projection_layer_norm_eps", config.projector_ln_eps));
    }
    if (text_object != nullptr) RefuseMultiAxisRotary(Fields(*text_object, "text_config", &problems), config.vision, &problems);
  }
  if (!config.quantization.has_value()) config.quantization = ReadQuantization(top, &problems);
  if (!problems.empty()) return problems.ToStatus();
  return config;
}

std::string WithoutQuantization(const std::string& json) {
  nlohmann::ordered_json root = nlohmann::ordered_json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return json;
  size_t dropped = root.erase("quantization_config");
  if (root.contains("text_config") && root["text_config"].is_object()) dropped += root["text_config"].erase("quantization_config");
  return dropped == 0 ? json : root.dump(2) + "\n";
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& path) {
  MOONPIPE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
  if (!config.ok()) return Annotate(config.status(), path);
  return config;
}

}  // namespace moonpipe
