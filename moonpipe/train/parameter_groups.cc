#include "moonpipe/train/parameter_groups.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/nearest_name.h"
#include "moonpipe/train/muon_parts.h"

namespace moonpipe {

using cluster::v1::OptimizerSpec;
using cluster::v1::ParameterGroup;

bool MatchesPattern(absl::string_view pattern, absl::string_view text) {
  size_t p = 0, t = 0, star = absl::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t]) && pattern[p] != '*') {
      ++p;
      ++t;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (star != absl::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

const char* UpdateKindName(UpdateKind kind) { return kind == UpdateKind::kMuon ? "muon" : "adamw"; }

namespace {

bool Matches(const ParameterGroup& group, const TensorSpec& tensor) {
  if (!tensor.trainable) return false;
  if (group.match() == "vision") return tensor.part == ModelPartKind::kVision;
  if (group.match() == "projector") return tensor.part == ModelPartKind::kProjector;
  if (group.match() == "decoder") return tensor.part == ModelPartKind::kDecoder;
  return MatchesPattern(group.match(), tensor.name);
}

}  // namespace

absl::StatusOr<std::vector<UpdateRule>> AssignUpdateRules(const OptimizerSpec& optimizer,
                                                          const std::vector<TensorSpec>& tensors,
                                                          const std::vector<TensorSpec>& all_tensors) {
  for (int i = 0; i < optimizer.groups_size(); ++i) {
    const ParameterGroup& group = optimizer.groups(i);
    const bool found =
        std::any_of(all_tensors.begin(), all_tensors.end(), [&](const TensorSpec& tensor) { return Matches(group, tensor); });
    if (found) continue;
    std::vector<std::string> names = {"vision", "projector", "decoder"};
    for (const TensorSpec& tensor : all_tensors) names.push_back(tensor.name);
    const std::vector<std::string> near = NearestNames(group.match(), names, 3);
    return absl::InvalidArgumentError(absl::StrCat(
        "optimizer.groups[", i, "].match: '", group.match(), "' matches none of the model's ", all_tensors.size(), " tensors; ",
        near.empty() ? std::string("say vision, projector, decoder or a pattern over parameter names")
                     : absl::StrCat("near names are ", absl::StrJoin(near, ", "))));
  }
  std::vector<UpdateRule> rules;
  for (const TensorSpec& tensor : tensors) {
    UpdateRule rule{optimizer.learning_rate(), optimizer.weight_decay(), !tensor.trainable};
    std::string kind = optimizer.kind();
    for (const ParameterGroup& group : optimizer.groups()) {
      if (!Matches(group, tensor)) continue;
      if (group.has_learning_rate()) rule.learning_rate = group.learning_rate();
      if (group.has_weight_decay()) rule.weight_decay = group.weight_decay();
      if (group.has_frozen()) rule.frozen = group.frozen();
      if (group.has_kind()) kind = group.kind();
      break;
    }
    if (kind == UpdateKindName(UpdateKind::kMuon) && TakesMuon(tensor)) rule.kind = UpdateKind::kMuon;
    rules.push_back(rule);
  }
  return rules;
}

}  // namespace moonpipe
