#include "moonpipe/pipeline/stage_split.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/spec/flops.h"

namespace moonpipe {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Costs of every possible stage of a split.
class StageCosts {
 public:
  StageCosts(const SplitCosts& costs, size_t stages)
      : costs_(costs), stages_(stages), sums_(costs.layers.size() + 1, 0) {
    for (size_t i = 0; i < costs.layers.size(); ++i) sums_[i + 1] = sums_[i] + costs.layers[i];
  }
  double Of(size_t stage, size_t first, size_t end) const {
    return sums_[end] - sums_[first] + (stage == 0 ? costs_.embedding : 0) + (stage + 1 == stages_ ? costs_.head : 0);
  }

 private:
  const SplitCosts& costs_;
  const size_t stages_;
  std::vector<double> sums_;
};

// Cuts [0, layers) so that the stages' scores, joined by `join`, are least. Returns the end of each stage. Of equal
// cuts the one with the earlier ends is taken.
template <typename Score, typename Join>
std::vector<size_t> BestCut(size_t layers, size_t stages, Score score, Join join, double& best_score) {
  // best[s][e]: least score of stages 0..s over layers [0, e).
  std::vector<std::vector<double>> best(stages, std::vector<double>(layers + 1, kNever));
  std::vector<std::vector<size_t>> begin(stages, std::vector<size_t>(layers + 1, 0));
  for (size_t stage = 0; stage < stages; ++stage) {
    for (size_t end = stage + 1; end <= layers; ++end) {
      for (size_t first = stage; first < end; ++first) {
        if (stage == 0 && first > 0) break;
        const double before = stage == 0 ? 0 : best[stage - 1][first];
        const double total = join(before, score(stage, first, end));
        if (total < best[stage][end]) {
          best[stage][end] = total;
          begin[stage][end] = first;
        }
      }
    }
  }
  best_score = best[stages - 1][layers];
  std::vector<size_t> ends(stages);
  size_t end = layers;
  for (size_t stage = stages; stage-- > 0;) {
    ends[stage] = end;
    end = begin[stage][end];
  }
  return ends;
}

std::vector<PartRange> RangesOf(const std::vector<size_t>& ends) {
  std::vector<PartRange> ranges;
  int64_t first = 0;
  for (size_t stage = 0; stage < ends.size(); ++stage) {
    PartRange range;
    range.first_layer = first;
    range.end_layer = static_cast<int64_t>(ends[stage]);
    range.has_embedding = stage == 0;
    range.has_head = stage + 1 == ends.size();
    ranges.push_back(range);
    first = range.end_layer;
  }
  return ranges;
}

}  // namespace

SplitCosts CostsOf(const ModelConfig& config) {
  SplitCosts costs;
  costs.embedding = static_cast<double>(config.text.hidden_size);
  costs.head = static_cast<double>(config.text.vocab_size) * static_cast<double>(config.text.hidden_size);
  for (int64_t layer = 0; layer < config.text.num_hidden_layers; ++layer) {
    costs.layers.push_back(static_cast<double>(ActiveLayerWeights(config.text, layer)));
  }
  return costs;
}

absl::StatusOr<std::vector<PartRange>> SplitLayers(const SplitCosts& costs, int32_t stages) {
  if (stages < 1 || static_cast<size_t>(stages) > costs.layers.size()) {
    return absl::InvalidArgumentError(absl::StrCat("pipeline.stages is ", stages, ", the model has ",
                                                   costs.layers.size(),
                                                   " decoder layers; each stage needs at least one: 1 to ",
                                                   costs.layers.size(), " stages fit"));
  }
  const size_t num_stages = static_cast<size_t>(stages);
  const StageCosts stage_costs(costs, num_stages);
  double least_maximum = 0;
  BestCut(
      costs.layers.size(), num_stages,
      [&](size_t s, size_t first, size_t end) { return stage_costs.Of(s, first, end); },
      [](double a, double b) { return std::max(a, b); }, least_maximum);
  // Many cuts share the least maximum; squares prefer the even ones.
  double ignored = 0;
  return RangesOf(BestCut(
      costs.layers.size(), num_stages,
      [&](size_t s, size_t first, size_t end) {
        const double cost = stage_costs.Of(s, first, end);
        return cost <= least_maximum ? cost * cost : kNever;
      },
      [](double a, double b) { return a + b; }, ignored));
}

absl::StatusOr<std::vector<PartRange>> SplitLayersAs(const std::vector<uint32_t>& layers_per_stage, int64_t num_layers,
                                                     int32_t stages) {
  if (stages < 1 || layers_per_stage.size() != static_cast<size_t>(stages)) {
    return absl::InvalidArgumentError(absl::StrCat("pipeline.layers_per_stage has ", layers_per_stage.size(),
                                                   " entries, pipeline.stages is ", stages,
                                                   "; give one entry a stage"));
  }
  std::vector<size_t> ends;
  size_t sum = 0;
  for (size_t stage = 0; stage < layers_per_stage.size(); ++stage) {
    if (layers_per_stage[stage] == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("pipeline.layers_per_stage[", stage, "] is 0; each stage needs at least 1 layer"));
    }
    sum += layers_per_stage[stage];
    ends.push_back(sum);
  }
  if (static_cast<int64_t>(sum) != num_layers) {
    return absl::InvalidArgumentError(absl::StrCat("pipeline.layers_per_stage ", absl::StrJoin(layers_per_stage, " + "),
                                                   " adds up to ", sum, " layers, the model has ", num_layers));
  }
  return RangesOf(ends);
}

}  // namespace moonpipe
