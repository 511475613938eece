#include "moonpipe/train/optimizer.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/train/muon.h"

namespace moonpipe {
namespace {

// Prefixes of the state's names.
constexpr char kExpAvg[] = "exp_avg.";
constexpr char kExpAvgSq[] = "exp_avg_sq.";
constexpr char kMomentum[] = "momentum.";

}  // namespace

Optimizer::Optimizer(ParameterStore* store, const cluster::v1::OptimizerSpec& spec, std::vector<UpdateRule> rules)
    : store_(store), beta1_(spec.beta1()), beta2_(spec.beta2()), epsilon_(spec.epsilon()), momentum_(spec.momentum()), rules_(std::move(rules)) {
  TORCH_CHECK(rules_.size() == store_->specs().size(), "one rule a tensor: ", rules_.size(), " rules for ", store_->specs().size());
  for (size_t i = 0; i < rules_.size(); ++i) {
    if (rules_[i].frozen) continue;
    const TensorSpec& tensor = store_->specs()[i];
    Entry entry{tensor.name, tensor.part, store_->PublishedValue(tensor.name).detach(), {}, {}, rules_[i], {}};
    entry.exp_avg = torch::zeros_like(entry.value, torch::kFloat);
    if (entry.rule.kind == UpdateKind::kMuon) {
      entry.parts = MatrixParts(store_->config(), tensor);
    } else {
      entry.exp_avg_sq = torch::zeros_like(entry.value, torch::kFloat);
    }
    entries_.push_back(std::move(entry));
  }
}

void Optimizer::Step(double clip_factor, double learning_rate_factor, bool move_vision, bool move_decoder) {
  torch::NoGradGuard no_grad;
  ++steps_;
  // One fused AdamW call for each set of tensors that share rate and decay.
  std::map<std::pair<double, double>, std::vector<const Entry*>> batches;
  for (const Entry& entry : entries_) {
    const bool moves = entry.part == ModelPartKind::kDecoder ? move_decoder : move_vision;
    if (!moves) continue;
    if (entry.rule.kind == UpdateKind::kAdamW) {
      batches[{entry.rule.learning_rate, entry.rule.weight_decay}].push_back(&entry);
      continue;
    }
    torch::Tensor gradient = store_->PublishedGradient(entry.name);
    if (clip_factor != 1.0) gradient.mul_(clip_factor);
    TakeMuonStep({entry.rule.learning_rate * learning_rate_factor, entry.rule.weight_decay, momentum_}, entry.parts, entry.value, gradient,
                 entry.exp_avg);
  }
  for (const auto& [rate_and_decay, batch] : batches) {
    std::vector<torch::Tensor> values, gradients, exp_avgs, exp_avg_sqs, step_counts;
    // The kernel reads the count where it runs.
    const torch::Tensor count =
        torch::full({}, static_cast<double>(steps_), torch::dtype(torch::kFloat).device(batch.front()->value.device()));
    for (const Entry* entry : batch) {
      values.push_back(entry->value);
      gradients.push_back(store_->PublishedGradient(entry->name));
      exp_avgs.push_back(entry->exp_avg);
      exp_avg_sqs.push_back(entry->exp_avg_sq);
      step_counts.push_back(count);
    }
    if (clip_factor != 1.0) torch::_foreach_mul_(gradients, clip_factor);
    // At rate 0 nothing may move, but -0 minus a negative 0 is 0: let the kernel, which still moves the moments, change copies.
    if (rate_and_decay.first * learning_rate_factor == 0) {
      for (torch::Tensor& value : values) value = value.clone();
    }
    at::_fused_adamw_(values, gradients, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, step_counts,
                      rate_and_decay.first * learning_rate_factor, beta1_, beta2_, rate_and_decay.second, epsilon_,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
}

std::vector<std::pair<std::string, torch::Tensor>> Optimizer::MomentsOf(const Entry& entry) {
  if (entry.rule.kind == UpdateKind::kMuon) return {{kMomentum, entry.exp_avg}};
  return {{kExpAvg, entry.exp_avg}, {kExpAvgSq, entry.exp_avg_sq}};
}

std::vector<StoredTensor> Optimizer::State() const {
  std::vector<StoredTensor> state;
  host_copies_.clear();
  const auto on_host = [this](const torch::Tensor& moment) {
    if (moment.is_cpu()) return moment.const_data_ptr();
    host_copies_.push_back(moment.to(torch::kCPU));
    return host_copies_.back().const_data_ptr();
  };
  for (const Entry& entry : entries_) {
    const std::vector<int64_t> shape = entry.value.sizes().vec();
    for (const auto& [prefix, moment] : MomentsOf(entry)) {
      state.push_back({absl::StrCat(prefix, entry.name), StoredType::kF32, shape, on_host(moment)});
    }
  }
  return state;
}

absl::Status Optimizer::LoadState(const std::vector<SafetensorsFile>& files, uint64_t steps) {
  auto read = [&](const std::string& name, torch::Tensor into) -> absl::Status {
    for (const SafetensorsFile& file : files) {
      const auto found = file.Find(name);
      if (!found.ok()) continue;
      const StoredTensor& stored = **found;
      if (stored.type != StoredType::kF32 || stored.shape != into.sizes().vec()) {
        return absl::InvalidArgumentError(absl::StrCat("optimizer state ", name, " in ", file.path(), " is ", stored.ToString(),
                                                       ", the model needs F32[", absl::StrJoin(into.sizes(), ", "), "]"));
      }
      into.copy_(torch::from_blob(const_cast<void*>(stored.data), into.sizes(), torch::kFloat));
      return absl::OkStatus();
    }
    return absl::NotFoundError(absl::StrCat("optimizer state ", name, " is in none of the ", files.size(),
                                            " optimizer files; a group that was frozen cannot be thawed from this checkpoint"));
  };
  const auto exists = [&](const std::string& name) {
    return std::any_of(files.begin(), files.end(), [&](const SafetensorsFile& file) { return file.Find(name).ok(); });
  };
  for (const Entry& entry : entries_) {
    const bool muon = entry.rule.kind == UpdateKind::kMuon;
    if (exists((muon ? kExpAvg : kMomentum) + entry.name) && !exists((muon ? kMomentum : kExpAvg) + entry.name)) {
      const char* const other = UpdateKindName(muon ? UpdateKind::kAdamW : UpdateKind::kMuon);
      return absl::FailedPreconditionError(absl::StrCat(
          "the checkpoint holds the state of ", other, " for ", entry.name, ", this run moves it by ", UpdateKindName(entry.rule.kind),
          "; set optimizer.kind (or the kind of its group) to ", other, ", or start anew from its weights with model.path"));
    }
    for (const auto& [prefix, tensor] : MomentsOf(entry)) {
      if (absl::Status status = read(absl::StrCat(prefix, entry.name), tensor); !status.ok()) return status;
    }
  }
  steps_ = steps;
  return absl::OkStatus();
}

uint64_t Optimizer::state_bytes() const {
  uint64_t bytes = 0;
  for (const Entry& entry : entries_) {
    for (const auto& [prefix, moment] : MomentsOf(entry)) bytes += moment.nbytes();
  }
  return bytes;
}

}  // namespace moonpipe
