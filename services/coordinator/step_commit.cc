#include "services/coordinator/step_commit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/nearest_name.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/pipeline/schedule.h"

namespace moonpipe {
namespace {

using Reports = std::map<uint32_t, worker::v1::StepReport>;

// As in the reference's clipping: keeps a norm of exactly the limit from scaling by more than one.
constexpr double kClipEpsilon = 1e-6;

absl::Status CheckReporters(const StepInputs& inputs, const Reports& reports) {
  const std::set<uint32_t> expected(inputs.workers.begin(), inputs.workers.end());
  for (const auto& [worker, report] : reports) {
    if (report.generation() != inputs.generation) {
      return absl::AbortedError(absl::StrCat("worker ", worker, " reports of generation ", report.generation(),
                                             ", the plan has ", inputs.generation));
    }
    if (report.step() != inputs.step) {
      return absl::AbortedError(
          absl::StrCat("worker ", worker, " reports step ", report.step(), ", step ", inputs.step, " runs"));
    }
    if (expected.count(worker) == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("worker ", worker, " reports step ", inputs.step, " but has no part in it"));
    }
  }
  for (uint32_t worker : expected) {
    if (reports.count(worker) == 0) {
      return absl::FailedPreconditionError(absl::StrCat("step ", inputs.step, ": worker ", worker,
                                                        " has not reported; ", reports.size(), " of ", expected.size(),
                                                        " have"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<double> SquaredNorm(const StepInputs& inputs, const Reports& reports) {
  std::unordered_map<std::string, size_t> place_of;
  for (size_t i = 0; i < inputs.parameter_names.size(); ++i) place_of[inputs.parameter_names[i]] = i;
  std::vector<std::optional<double>> norms(inputs.parameter_names.size());
  for (const auto& [worker, report] : reports) {
    for (const worker::v1::ParameterNorm& norm : report.norms()) {
      const auto place = place_of.find(norm.name());
      if (place == place_of.end()) {
        const auto nearest = NearestNames(norm.name(), inputs.parameter_names);
        return absl::InvalidArgumentError(
            absl::StrCat("worker ", worker, " reports the norm of ", norm.name(), ", which is not a trained parameter",
                         nearest.empty() ? "" : absl::StrCat("; nearest is ", nearest[0])));
      }
      std::optional<double>& entry = norms[place->second];
      if (entry.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat("the norm of ", norm.name(), " is reported twice, the second time by worker ", worker));
      }
      if (norm.squared_norm() < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("worker ", worker, " reports the squared norm ", norm.squared_norm(), " of ", norm.name()));
      }
      entry = norm.squared_norm();
    }
  }
  double sum = 0;
  for (size_t i = 0; i < norms.size(); ++i) {
    if (!norms[i].has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("step ", inputs.step, ": nobody reports the norm of ", inputs.parameter_names[i]));
    }
    sum += *norms[i];
  }
  return sum;
}

absl::StatusOr<double> LossSum(const StepInputs& inputs, const Reports& reports) {
  const data::v1::StepManifest& manifest = *inputs.manifest;
  std::vector<std::optional<double>> sums(static_cast<size_t>(manifest.microbatches_size()));
  for (const auto& [worker, report] : reports) {
    for (const worker::v1::MicrobatchLoss& loss : report.losses()) {
      if (loss.microbatch() >= sums.size()) {
        return absl::InvalidArgumentError(absl::StrCat("worker ", worker, " reports the loss of microbatch ",
                                                       loss.microbatch(), ", the step has ", sums.size()));
      }
      std::optional<double>& entry = sums[loss.microbatch()];
      if (entry.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat("the loss of microbatch ", loss.microbatch(), " is reported twice"));
      }
      const uint32_t labels = manifest.microbatches(static_cast<int>(loss.microbatch())).trained_labels();
      if (loss.trained_labels() != labels) {
        return absl::InvalidArgumentError(absl::StrCat("worker ", worker, " trained ", loss.trained_labels(),
                                                       " labels of microbatch ", loss.microbatch(),
                                                       ", the manifest has ", labels));
      }
      entry = loss.loss_sum();
    }
  }
  double sum = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    if (!sums[i].has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("step ", inputs.step, ": nobody reports the loss of microbatch ", i));
    }
    sum += *sums[i];
  }
  return sum;
}

absl::StatusOr<std::vector<worker::v1::ExpertCounts>> SumExpertCounts(const Reports& reports) {
  std::map<uint32_t, worker::v1::ExpertCounts> layers;
  for (const auto& [worker, report] : reports) {
    for (const worker::v1::ExpertCounts& counts : report.expert_counts()) {
      const auto [layer, is_new] = layers.emplace(counts.layer(), counts);
      if (is_new) continue;
      worker::v1::ExpertCounts& sum = layer->second;
      if (sum.counts_size() != counts.counts_size()) {
        return absl::InvalidArgumentError(absl::StrCat("worker ", worker, " counts ", counts.counts_size(),
                                                       " experts in layer ", counts.layer(), ", another worker ",
                                                       sum.counts_size()));
      }
      for (int i = 0; i < counts.counts_size(); ++i) sum.set_counts(i, sum.counts(i) + counts.counts(i));
    }
  }
  std::vector<worker::v1::ExpertCounts> sums;
  for (const auto& [layer, counts] : layers) sums.push_back(counts);
  return sums;
}

absl::StatusOr<std::vector<worker::v1::LargestLogits>> MaximumLogits(const Reports& reports) {
  std::map<uint32_t, worker::v1::LargestLogits> layers;
  for (const auto& [worker, report] : reports) {
    for (const worker::v1::LargestLogits& logits : report.largest_logits()) {
      const auto [layer, is_new] = layers.emplace(logits.layer(), logits);
      if (is_new) continue;
      worker::v1::LargestLogits& largest = layer->second;
      if (largest.logits_size() != logits.logits_size()) {
        return absl::InvalidArgumentError(absl::StrCat("worker ", worker, " reports the logits of ", logits.logits_size(),
                                                       " heads in layer ", logits.layer(), ", another worker ",
                                                       largest.logits_size()));
      }
      for (int i = 0; i < logits.logits_size(); ++i) largest.set_logits(i, std::max(largest.logits(i), logits.logits(i)));
    }
  }
  std::vector<worker::v1::LargestLogits> all;
  for (const auto& [layer, logits] : layers) all.push_back(logits);
  return all;
}

double BubbleRatio(const Reports& reports) {
  int64_t begin = std::numeric_limits<int64_t>::max();
  int64_t end = std::numeric_limits<int64_t>::min();
  double busy = 0;
  int stages = 0;
  for (const auto& [worker, report] : reports) {
    bool is_stage = false;
    double own = 0;
    for (const worker::v1::ActionTiming& timing : report.timings()) {
      const auto action = ParseAction(timing.action());
      if (!action.ok()) continue;  // a timing that is no action (reading data) is not work of the model
      begin = std::min(begin, timing.begin_us());
      end = std::max(end, timing.end_us());
      is_stage = is_stage || action->chunk != kVisionChunk;
      if (action->type == ActionType::kForward || action->type == ActionType::kBackward) {
        own += static_cast<double>(timing.end_us() - timing.begin_us());
      }
    }
    if (!is_stage) continue;
    ++stages;
    busy += own;
  }
  if (stages == 0 || end <= begin) return 0;
  return std::clamp(1 - busy / (static_cast<double>(end - begin) * stages), 0.0, 1.0);
}

}  // namespace

absl::StatusOr<StepDecision> DecideStep(const StepInputs& inputs, const Reports& reports) {
  MOONPIPE_RETURN_IF_ERROR(CheckReporters(inputs, reports));
  StepDecision decision;
  for (const auto& microbatch : inputs.manifest->microbatches()) decision.trained_labels += microbatch.trained_labels();
  MOONPIPE_ASSIGN_OR_RETURN(const double squared_norm, SquaredNorm(inputs, reports));
  MOONPIPE_ASSIGN_OR_RETURN(const double loss_sum, LossSum(inputs, reports));
  MOONPIPE_ASSIGN_OR_RETURN(decision.expert_counts, SumExpertCounts(reports));
  MOONPIPE_ASSIGN_OR_RETURN(decision.largest_logits, MaximumLogits(reports));
  for (const auto& [worker, report] : reports) decision.balance_loss += report.balance_loss();
  decision.bubble_ratio = BubbleRatio(reports);
  for (const auto& [worker, report] : reports) {
    decision.peak_memory_bytes = std::max(decision.peak_memory_bytes, report.peak_memory_bytes());
  }
  // Empty comes first: whatever a step without labels computed means nothing.
  if (decision.trained_labels == 0) {
    decision.skip_reason = "empty";
    return decision;
  }
  decision.grad_norm = std::sqrt(squared_norm);
  decision.loss = loss_sum / static_cast<double>(decision.trained_labels);
  if (!std::isfinite(decision.grad_norm) || !std::isfinite(decision.loss)) {
    decision.skip_reason = "not_finite";
    return decision;
  }
  decision.commit = true;
  if (inputs.max_grad_norm > 0) {
    decision.clip_factor = std::min(1.0, inputs.max_grad_norm / (decision.grad_norm + kClipEpsilon));
  }
  return decision;
}

}  // namespace moonpipe
