#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/nearest_name.h"
#include "moonpipe/config/run_file.h"
#include "moonpipe/spec/flavors.h"

namespace moonpipe {
namespace {

using cluster::v1::LearningRateSchedule;
using cluster::v1::TrainingRunSpec;
using cluster::v1::VisionSpec;

constexpr uint32_t kMostStages = 1024;
constexpr uint32_t kMostMicrobatches = 1 << 16;
constexpr uint32_t kMostThreads = 1024;

class Violations {
 public:
  void Add(std::string field, std::string description) { list_.push_back({std::move(field), std::move(description)}); }

  void Require(bool present, const std::string& field, absl::string_view what) {
    if (!present) Add(field, absl::StrCat("is required: ", what));
  }

  // A whole number in [least, most].
  void Range(const std::string& field, uint64_t value, uint64_t least, uint64_t most) {
    if (value < least || value > most)
      Add(field, absl::StrCat("must be from ", least, " to ", most, ", found ", value));
  }

  void AtLeastOne(const std::string& field, uint64_t value) {
    if (value < 1) Add(field, absl::StrCat("must be at least 1, found ", value));
  }

  void Positive(const std::string& field, double value) {
    if (!(std::isfinite(value) && value > 0))
      Add(field, absl::StrCat("must be a finite number above 0, found ", value));
  }

  void NotNegative(const std::string& field, double value) {
    if (!(std::isfinite(value) && value >= 0))
      Add(field, absl::StrCat("must be a finite number of at least 0, found ", value));
  }

  void OneOf(const std::string& field, const std::string& value, const std::vector<std::string>& known) {
    for (const std::string& name : known) {
      if (value == name) return;
    }
    std::string description = absl::StrCat("must be one of ", absl::StrJoin(known, ", "), "; found \"", value, "\"");
    const auto near = NearestNames(value, known);
    if (!near.empty()) absl::StrAppend(&description, "; did you mean ", near[0], "?");
    Add(field, std::move(description));
  }

  std::vector<FieldViolation> Release() { return std::move(list_); }

 private:
  std::vector<FieldViolation> list_;
};

void CheckFiles(const google::protobuf::RepeatedPtrField<std::string>& files, const std::string& field, Violations* v) {
  v->Require(!files.empty(), field, "files of samples, at least one");
  for (int i = 0; i < files.size(); ++i) {
    if (files[i].empty()) v->Add(absl::StrCat(field, "[", i, "]"), "is an empty path");
  }
}

void CheckModel(const cluster::v1::ModelSpec& model, Violations* v) {
  std::vector<std::string> given;
  if (model.has_path()) given.push_back("path");
  if (model.has_config()) given.push_back("config");
  if (model.has_flavor()) given.push_back("flavor");
  if (given.empty()) v->Add("model", "is required: exactly one of path, config and flavor; found none");
  if (given.size() > 1) {
    v->Add("model",
           absl::StrCat("takes exactly one of path, config and flavor; found ", absl::StrJoin(given, " and ")));
  }
  if (model.keep_quantised() && !model.has_path()) {
    v->Add("model.keep_quantised", "is true, but only the weights of a folder (model.path) can be quantised");
  }
  if (model.has_path() && model.path().empty()) v->Add("model.path", "is an empty path");
  if (model.has_config() && model.config().empty()) v->Add("model.config", "is an empty path");
  if (model.has_flavor()) {
    if (const auto flavor = FindFlavor(model.flavor()); !flavor.ok()) v->Add("model.flavor", std::string(flavor.status().message()));
  }
  v->OneOf("model.experts", model.experts(), {"grouped", "loop"});
  v->OneOf("model.attention", model.attention(), {"fused", "explicit"});
  v->OneOf("model.norm_rounding", model.norm_rounding(), {"before_weight", "after_weight"});
}

void CheckData(const cluster::v1::DataSpec& data, Violations* v) {
  if (data.has_batches()) {
    if (data.batches().empty()) v->Add("data.batches", "is an empty path");
    if (!data.train().empty()) {
      v->Add("data.batches", absl::StrCat("names a recorded batch to train on, and data.train ", data.train_size(), " files; remove one or the other"));
    }
    v->Require(!data.batch_case().empty(), "data.batch_case", "the case in data.batches that every step trains on");
  } else {
    CheckFiles(data.train(), "data.train", v);
    v->Require(!data.tokenizer().empty(), "data.tokenizer", "the folder with tiktoken.model and tokenizer_config.json");
    if (data.has_batch_case()) v->Add("data.batch_case", "names a case of data.batches, which is not given");
  }
  v->OneOf("data.chat_template", data.chat_template(), {"kimi-vl", "moonlight"});
  v->AtLeastOne("data.packing_window", data.packing_window());
  v->OneOf("data.too_long", data.too_long(), {"drop"});
  if (data.has_max_patches()) v->AtLeastOne("data.max_patches", data.max_patches());
  v->NotNegative("data.random_rotation_degrees", data.random_rotation_degrees());
  v->NotNegative("data.random_scale", data.random_scale());
}

void CheckPipeline(const cluster::v1::PipelineSpec& pipeline, bool packs, Violations* v) {
  v->Range("pipeline.stages", pipeline.stages(), 1, kMostStages);
  v->OneOf("pipeline.schedule", pipeline.schedule(), {"1f1b", "gpipe"});
  v->Range("pipeline.microbatches", pipeline.microbatches(), 1, kMostMicrobatches);
  // Rows of a recorded batch are taken as they are.
  v->Require(pipeline.has_microbatch_tokens() || !packs, "pipeline.microbatch_tokens", "the most tokens of one microbatch");
  // A label is the next token: one token alone trains nothing.
  if (pipeline.has_microbatch_tokens() && pipeline.microbatch_tokens() < 2) {
    v->Add("pipeline.microbatch_tokens", absl::StrCat("must be at least 2, found ", pipeline.microbatch_tokens()));
  }
  const auto& layers = pipeline.layers_per_stage();
  if (!layers.empty() && static_cast<uint32_t>(layers.size()) != pipeline.stages()) {
    v->Add("pipeline.layers_per_stage", absl::StrCat("has ", layers.size(), " numbers for ", pipeline.stages(),
                                                     " stages; give one a stage, or none to split evenly"));
  }
}

void CheckTrain(const cluster::v1::TrainSpec& train, const cluster::v1::PipelineSpec& pipeline, Violations* v) {
  v->Require(train.has_steps(), "train.steps", "the number of optimizer steps");
  if (train.has_steps()) v->AtLeastOne("train.steps", train.steps());
  v->AtLeastOne("train.gradient_groups", train.gradient_groups());
  if (train.gradient_groups() > pipeline.microbatches() && pipeline.microbatches() > 0) {
    v->Add("train.gradient_groups", absl::StrCat("is ", train.gradient_groups(), " with ", pipeline.microbatches(),
                                                 " microbatches; a group needs at least one microbatch"));
  }
  v->NotNegative("train.max_grad_norm", train.max_grad_norm());
  v->NotNegative("train.expert_bias_rate", train.expert_bias_rate());
  v->OneOf("train.expert_bias_rule", train.expert_bias_rule(), {"sign", "centred"});
  v->NotNegative("train.balance_loss_weight", train.balance_loss_weight());
  v->OneOf("train.recompute", train.recompute(), {"none", "experts", "layers"});
  v->OneOf("train.compute_type", train.compute_type(), {"fp32", "bf16"});
}

void CheckSchedule(const LearningRateSchedule& schedule, uint64_t steps, Violations* v) {
  if (!LearningRateSchedule::Kind_IsValid(schedule.kind())) {
    v->Add("optimizer.schedule.kind", absl::StrCat("is the unknown number ", static_cast<int>(schedule.kind())));
  }
  if (!(schedule.min_ratio() >= 0 && schedule.min_ratio() <= 1)) {
    v->Add("optimizer.schedule.min_ratio", absl::StrCat("must be from 0 to 1, found ", schedule.min_ratio()));
  }
  if (steps == 0) return;
  if (schedule.warmup_steps() > steps) {
    v->Add("optimizer.schedule.warmup_steps",
           absl::StrCat("is ", schedule.warmup_steps(), ", more than the ", steps, " steps of the run"));
  } else if (schedule.kind() == LearningRateSchedule::KIND_WSD &&
             schedule.decay_steps() > steps - schedule.warmup_steps()) {
    v->Add("optimizer.schedule.decay_steps",
           absl::StrCat("is ", schedule.decay_steps(), ", but only ", steps - schedule.warmup_steps(), " of ", steps,
                        " steps follow the warm-up"));
  }
}

void CheckOptimizer(const cluster::v1::OptimizerSpec& optimizer, uint64_t steps, Violations* v) {
  v->Require(optimizer.has_learning_rate(), "optimizer.learning_rate", "the peak learning rate");
  if (optimizer.has_learning_rate()) v->NotNegative("optimizer.learning_rate", optimizer.learning_rate());
  const auto moment = [&](const std::string& field, double beta) {
    if (!(beta >= 0 && beta < 1)) v->Add(field, absl::StrCat("must be at least 0 and below 1, found ", beta));
  };
  moment("optimizer.beta1", optimizer.beta1());
  moment("optimizer.beta2", optimizer.beta2());
  v->Positive("optimizer.epsilon", optimizer.epsilon());
  v->NotNegative("optimizer.weight_decay", optimizer.weight_decay());
  v->OneOf("optimizer.kind", optimizer.kind(), {"adamw", "muon"});
  moment("optimizer.momentum", optimizer.momentum());
  v->NotNegative("optimizer.qk_clip_threshold", optimizer.qk_clip_threshold());
  CheckSchedule(optimizer.schedule(), steps, v);
  std::set<std::string> names;
  for (int i = 0; i < optimizer.groups_size(); ++i) {
    const auto& group = optimizer.groups(i);
    const std::string path = absl::StrCat("optimizer.groups[", i, "]");
    v->Require(!group.match().empty(), path + ".match", "vision, projector, decoder or a pattern over parameter names");
    if (!group.name().empty() && !names.insert(group.name()).second) {
      v->Add(path + ".name", absl::StrCat("\"", group.name(), "\" names an earlier group as well"));
    }
    if (group.has_learning_rate()) v->NotNegative(path + ".learning_rate", group.learning_rate());
    if (group.has_weight_decay()) v->NotNegative(path + ".weight_decay", group.weight_decay());
    if (group.has_kind()) v->OneOf(path + ".kind", group.kind(), {"adamw", "muon"});
    if (group.frozen() && (group.has_learning_rate() || group.has_weight_decay() || group.has_kind())) {
      v->Add(path + ".frozen",
             "is true, so learning_rate, weight_decay and kind of the group have no effect; remove one or the other");
    }
  }
}

void CheckEval(const cluster::v1::EvalSpec& eval, Violations* v) {
  v->AtLeastOne("eval.max_answer_tokens", eval.max_answer_tokens());
  std::set<std::string> names;
  for (int i = 0; i < eval.sets_size(); ++i) {
    const auto& set = eval.sets(i);
    const std::string path = absl::StrCat("eval.sets[", i, "]");
    v->Require(!set.name().empty(), path + ".name", "its name in the report");
    for (const char c : set.name()) {
      // It becomes a key of the report and a label of metrics.
      if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '_' && c != '-') {
        v->Add(path + ".name", absl::StrCat("may have letters, digits, - and _; found \"", set.name(), "\""));
        break;
      }
    }
    if (!set.name().empty() && !names.insert(set.name()).second) {
      v->Add(path + ".name", absl::StrCat("\"", set.name(), "\" names an earlier set as well"));
    }
    CheckFiles(set.files(), path + ".files", v);
  }
}

void CheckRuntime(const cluster::v1::RuntimeSpec& runtime, Violations* v) {
  v->Range("runtime.compute_threads", runtime.compute_threads(), 1, kMostThreads);
  v->Positive("runtime.heartbeat_timeout_seconds", runtime.heartbeat_timeout_seconds());
  v->Positive("runtime.step_timeout_seconds", runtime.step_timeout_seconds());
  v->Positive("runtime.start_timeout_seconds", runtime.start_timeout_seconds());
  v->Positive("runtime.save_timeout_seconds", runtime.save_timeout_seconds());
  v->AtLeastOne("runtime.max_edge_message_bytes", runtime.max_edge_message_bytes());
}

}  // namespace

std::vector<FieldViolation> ValidateSpec(const TrainingRunSpec& spec) {
  TrainingRunSpec full = spec;
  ResolveDefaults(&full);
  Violations v;
  CheckModel(full.model(), &v);
  CheckData(full.data(), &v);
  CheckPipeline(full.pipeline(), /*packs=*/!full.data().has_batches(), &v);
  if (!VisionSpec::Placement_IsValid(full.vision().placement())) {
    v.Add("vision.placement", absl::StrCat("is the unknown number ", static_cast<int>(full.vision().placement())));
  }
  CheckTrain(full.train(), full.pipeline(), &v);
  CheckOptimizer(full.optimizer(), full.train().steps(), &v);
  if (full.checkpoint().keep_last() < 1) v.AtLeastOne("checkpoint.keep_last", full.checkpoint().keep_last());
  v.Require(!full.checkpoint().resume().empty(), "checkpoint.resume",
            "auto, never, a step or the path of a checkpoint");
  CheckEval(full.eval(), &v);
  if (!full.eval().sets().empty() && full.data().tokenizer().empty() && full.data().has_batches()) {
    v.Add("eval.sets", "needs data.tokenizer: a recorded batch has no text");
  }
  CheckRuntime(full.runtime(), &v);
  return v.Release();
}

}  // namespace moonpipe
