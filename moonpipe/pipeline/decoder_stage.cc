#include "moonpipe/pipeline/decoder_stage.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/base/torch_status.h"
#include "moonpipe/model/hf_weights.h"
#include "moonpipe/model/label_shift.h"
#include "moonpipe/model/loss.h"
#include "moonpipe/pipeline/step_observation.h"

namespace moonpipe {
namespace {

// int32 bytes as they travel -> int64 [T].
absl::StatusOr<torch::Tensor> ToIndices(const std::string& bytes, int64_t expected, const char* what, uint32_t microbatch) {
  if (bytes.size() != static_cast<size_t>(expected) * sizeof(int32_t)) {
    return absl::DataLossError(absl::StrCat("microbatch ", microbatch, ": ", bytes.size(), " bytes of ", what, " came, ", expected,
                                            " rows need ", expected * static_cast<int64_t>(sizeof(int32_t))));
  }
  torch::Tensor values = torch::empty({expected}, torch::kInt32);
  std::memcpy(values.mutable_data_ptr(), bytes.data(), bytes.size());
  return values.to(torch::kInt64);
}

// The rows of features_MH that no span holds.
torch::Tensor KeptRows(const torch::Tensor& features_MH, const google::protobuf::RepeatedPtrField<data::v1::RowSpan>& masked) {
  if (masked.empty()) return features_MH;
  std::vector<torch::Tensor> kept;
  int64_t begin = 0;
  for (const data::v1::RowSpan& span : masked) {
    TORCH_CHECK(span.begin() >= begin && span.begin() < span.end() && span.end() <= features_MH.size(0), "masked feature rows ", span.begin(), " to ",
                span.end(), " do not follow row ", begin, " of ", features_MH.size(0));
    if (span.begin() > begin) kept.push_back(features_MH.narrow(0, begin, span.begin() - begin));
    begin = span.end();
  }
  if (begin < features_MH.size(0)) kept.push_back(features_MH.narrow(0, begin, features_MH.size(0) - begin));
  return kept.empty() ? torch::Tensor() : torch::cat(kept);
}

}  // namespace

DecoderStage::DecoderStage(ParameterStore* store, GradientAccumulator* gradients, const Options& options)
    : options_(options), store_(store), gradients_(gradients), part_(*store) {}

std::vector<data::v1::MicrobatchView> DecoderStage::views() const {
  std::vector<data::v1::MicrobatchView> views;
  if (store_->range().has_embedding) views.push_back(data::v1::MICROBATCH_VIEW_TOKENS);
  if (store_->range().has_head) views.push_back(data::v1::MICROBATCH_VIEW_LABELS);
  return views;
}

absl::Status DecoderStage::BeginStep(const StepContext& step) {
  step_ = step;
  in_flight_.clear();
  expert_counts_.clear();
  largest_logits_.clear();
  balance_loss_ = torch::Tensor();
  balance_scale_ = 0;
  if (options_.balance_loss_weight > 0 && !step.run->decode()) {
    int64_t documents = 0;
    for (const auto& microbatch : step.run->manifest().microbatches()) documents += microbatch.document_lengths_size();
    balance_scale_ = options_.balance_loss_weight / static_cast<double>(std::max<int64_t>(documents, 1));
  }
  losses_.clear();
  next_tokens_.clear();
  tied_added_ = false;
  pinned_routing_.reset();
  if (!step.run->pinned_routing().empty()) {
    MOONPIPE_ASSIGN_OR_RETURN(pinned_routing_, SafetensorsFile::Open(step.run->pinned_routing()));
  }
  return absl::OkStatus();
}

absl::Status DecoderStage::PinRouting(uint32_t microbatch) {
  int64_t begin = 0, total = 0;
  for (const auto& other : step_.run->manifest().microbatches()) {
    if (other.index() < microbatch) begin += other.tokens();
    total += other.tokens();
  }
  const int64_t tokens = step_.run->manifest().microbatches(static_cast<int>(microbatch)).tokens();
  for (int64_t layer = store_->range().first_layer; layer < store_->range().end_layer; ++layer) {
    if (!store_->config().text.IsMoeLayer(layer)) continue;
    torch::Tensor rows_TK;
    if (pinned_routing_.has_value()) {
      MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* stored, pinned_routing_->Find(absl::StrCat("router.", layer, ".indices")));
      MOONPIPE_ASSIGN_OR_RETURN(const torch::Tensor all_TK, ToTorch(*stored));
      TORCH_CHECK(all_TK.dim() == 2 && all_TK.size(0) == total && all_TK.scalar_type() == torch::kLong, stored->name, " of ",
                  pinned_routing_->path(), " is ", all_TK.sizes(), ", the step has ", total, " tokens");
      rows_TK = all_TK.narrow(0, begin, tokens);
      TORCH_CHECK(rows_TK.min().item<int64_t>() >= 0 && rows_TK.max().item<int64_t>() < store_->config().text.n_routed_experts, stored->name,
                  " names an expert beyond the layer's ", store_->config().text.n_routed_experts);
    }
    part_.PinRouting(layer, rows_TK);
  }
  return absl::OkStatus();
}

absl::StatusOr<torch::Tensor> DecoderStage::Forward(uint32_t microbatch, const StageInputs& inputs) {
  return CatchTorch([&] { return ForwardOrThrow(microbatch, inputs); });
}

absl::StatusOr<torch::Tensor> DecoderStage::ForwardOrThrow(uint32_t microbatch, const StageInputs& inputs) {
  const auto& manifest = step_.run->manifest().microbatches(static_cast<int>(microbatch));
  const PartRange& range = store_->range();
  const bool decode = step_.run->decode();
  torch::AutoGradMode graph(!decode);
  InFlight flight;
  DecoderInput input;
  input.document_lengths.assign(manifest.document_lengths().begin(), manifest.document_lengths().end());
  MOONPIPE_RETURN_IF_ERROR(ReadInputs(microbatch, inputs, flight, input));
  MOONPIPE_RETURN_IF_ERROR(PinRouting(microbatch));
  const TensorObserver observer = step_.observation == nullptr ? TensorObserver() : step_.observation->OfMicrobatch(microbatch);
  part_.set_observer(observer);
  if (decode) input.logits_to_keep = 1;
  input.skip_head = input.last_hidden = !decode;
  input.balance_scale = balance_scale_;
  input.largest_logits = options_.qk_clip_threshold > 0 && !decode;
  DecoderOutput output = part_.Forward(input);
  for (const ExpertLoad& load : output.loads) {
    torch::Tensor& counts = expert_counts_[load.layer];
    counts = counts.defined() ? counts + load.counts_E : load.counts_E;
    if (load.balance_loss.defined()) balance_loss_ = balance_loss_.defined() ? balance_loss_ + load.balance_loss : load.balance_loss;
  }
  for (const HeadLogits& logits : output.logits) {
    torch::Tensor& largest = largest_logits_[logits.layer];
    largest = largest.defined() ? torch::maximum(largest, logits.largest_N) : logits.largest_N;
  }
  if (!range.has_head) {
    flight.output = output.hidden_or_logits.to(torch::kFloat);  // edges carry fp32
    torch::Tensor hidden = flight.output.detach();
    if (!decode) in_flight_[microbatch] = std::move(flight);
    return hidden;
  }
  if (decode) {
    const torch::Tensor next = output.hidden_or_logits.argmax(-1).to(torch::kInt32).contiguous();
    const int32_t* tokens = next.const_data_ptr<int32_t>();
    next_tokens_[microbatch].assign(tokens, tokens + next.numel());
    return torch::Tensor();
  }
  MOONPIPE_ASSIGN_OR_RETURN(const std::string bytes,
                            step_.provider->Take(microbatch, data::v1::MICROBATCH_VIEW_LABELS, step_.deadline));
  MOONPIPE_ASSIGN_OR_RETURN(const torch::Tensor own_T, ToIndices(bytes, manifest.tokens(), "labels", microbatch));
  const torch::Tensor labels_T = ShiftLabels(own_T, input.document_lengths, store_->config().ignore_index);
  const int64_t trained = (labels_T != kIgnoredLabel).sum().item<int64_t>();
  if (trained != manifest.trained_labels()) {
    return absl::InternalError(absl::StrCat("microbatch ", microbatch, " trains ", trained, " labels, the manifest announces ",
                                            manifest.trained_labels()));
  }
  const Loss loss = HeadCrossEntropy(output.last_hidden_TH, store_->HeadWeight(), labels_T);
  if (observer) observer("token_nll", loss.nll_T);
  worker::v1::MicrobatchLoss& report = losses_[microbatch];
  report.set_microbatch(microbatch);
  report.set_loss_sum(loss.sum.item<float>());
  report.set_trained_labels(manifest.trained_labels());
  // The mean over the whole step's labels; a step without any is skipped by the coordinator, and then this is 0 / 1.
  flight.output = loss.sum / static_cast<double>(std::max<uint64_t>(step_.run->trained_labels(), 1));
  in_flight_[microbatch] = std::move(flight);
  return torch::Tensor();
}

absl::Status DecoderStage::ReadInputs(uint32_t microbatch, const StageInputs& inputs, InFlight& flight, DecoderInput& input) {
  const auto& manifest = step_.run->manifest().microbatches(static_cast<int>(microbatch));
  const bool decode = step_.run->decode();
  if (!store_->range().has_embedding) {
    flight.hidden = inputs.hidden.detach().requires_grad_(!decode);
    input.tokens_or_hidden = flight.hidden;
    return absl::OkStatus();
  }
  if (manifest.has_embeddings()) {
    MOONPIPE_ASSIGN_OR_RETURN(const std::string bytes,
                              step_.provider->Take(microbatch, data::v1::MICROBATCH_VIEW_EMBEDDINGS, step_.deadline));
    input.embeddings_TH = torch::empty({manifest.tokens(), hidden_size()});
    if (bytes.size() != input.embeddings_TH.nbytes()) {
      return absl::DataLossError(absl::StrCat("microbatch ", microbatch, ": ", bytes.size(), " bytes of embeddings came, ", manifest.tokens(),
                                              " rows of ", hidden_size(), " need ", input.embeddings_TH.nbytes()));
    }
    std::memcpy(input.embeddings_TH.mutable_data_ptr(), bytes.data(), bytes.size());
    return absl::OkStatus();
  }
  MOONPIPE_ASSIGN_OR_RETURN(const std::string bytes,
                            step_.provider->Take(microbatch, data::v1::MICROBATCH_VIEW_TOKENS, step_.deadline));
  MOONPIPE_ASSIGN_OR_RETURN(input.tokens_or_hidden, ToIndices(bytes, manifest.tokens(), "tokens", microbatch));
  if (inputs.features.defined()) {
    flight.features = inputs.features.detach().requires_grad_(!decode);
    input.features_MH = KeptRows(flight.features, manifest.masked_features());
  }
  return absl::OkStatus();
}

absl::StatusOr<StageGradients> DecoderStage::Backward(uint32_t microbatch, const torch::Tensor& output_gradient) {
  auto found = in_flight_.extract(microbatch);
  if (found.empty()) return absl::InternalError(absl::StrCat("microbatch ", microbatch, " has no forward to go back through"));
  return CatchTorch([&]() -> absl::StatusOr<StageGradients> {
    InFlight flight = std::move(found.mapped());
    gradients_->Select(microbatch);
    // Frozen layers behind an input without gradient have no graph.
    if (flight.output.requires_grad()) flight.output.backward(output_gradient);
    StageGradients gradients;
    if (flight.hidden.defined()) gradients.hidden = flight.hidden.grad();
    if (flight.features.defined()) {
      // No token took any: the tower gets exact zeros.
      gradients.features = flight.features.grad().defined() ? flight.features.grad() : torch::zeros_like(flight.features);
    }
    return gradients;
  });
}

torch::Tensor DecoderStage::tied_gradient() {
  if (!store_->config().text.tie_word_embeddings) return {};
  gradients_->Finish();
  if (store_->range().has_embedding) return store_->PublishedGradient(store_->decoder_prefix() + "embed_tokens.weight");
  return store_->tied_head().grad();
}

void DecoderStage::AddTiedGradient(const torch::Tensor& other) {
  torch::NoGradGuard no_grad;
  torch::Tensor embedding = store_->PublishedGradient(store_->decoder_prefix() + "embed_tokens.weight");
  // The part with the head alone has exact zeros there: its own share lies in the head's accumulator.
  if (!store_->range().has_embedding) embedding.copy_(store_->tied_head().grad());
  embedding.add_(other);
  tied_added_ = true;
}

absl::Status DecoderStage::FillReport(worker::v1::StepReport& report) {
  return CatchTorch([&]() -> absl::Status {
    gradients_->Finish();
    if (!tied_added_ && store_->tied_head().defined() && store_->range().has_embedding && !step_.run->decode()) {
      AddTiedGradient(store_->tied_head().grad());
    }
    for (const auto& [microbatch, loss] : losses_) *report.add_losses() = loss;
    for (const auto& [microbatch, tokens] : next_tokens_) report.mutable_next_tokens()->Add(tokens.begin(), tokens.end());
    if (balance_loss_.defined()) report.set_balance_loss(balance_loss_.item<double>());
    for (const auto& [layer, largest] : largest_logits_) {
      worker::v1::LargestLogits* entry = report.add_largest_logits();
      entry->set_layer(static_cast<uint32_t>(layer));
      const torch::Tensor host = largest.cpu().contiguous();
      const float* values = host.const_data_ptr<float>();
      for (int64_t head = 0; head < host.numel(); ++head) entry->add_logits(values[head]);
    }
    for (const auto& [layer, counts] : expert_counts_) {
      worker::v1::ExpertCounts* entry = report.add_expert_counts();
      entry->set_layer(static_cast<uint32_t>(layer));
      const torch::Tensor host = counts.contiguous();
      const int64_t* values = host.const_data_ptr<int64_t>();
      for (int64_t e = 0; e < host.numel(); ++e) entry->add_counts(static_cast<uint64_t>(values[e]));
    }
    return absl::OkStatus();
  });
}

void DecoderStage::AfterStep(const worker::v1::CommitStep& commit) {
  torch::NoGradGuard no_grad;
  for (const auto& entry : commit.largest_logits()) {
    if (!largest_logits_.contains(entry.layer())) continue;  // another stage's layer
    part_.ClipHeads(entry.layer(), {entry.logits().begin(), entry.logits().end()}, options_.qk_clip_threshold);
  }
  if (options_.expert_bias_rate == 0) return;
  for (const auto& entry : commit.expert_counts()) {
    if (!expert_counts_.contains(entry.layer())) continue;  // another stage's layer
    torch::Tensor counts = torch::empty({entry.counts_size()}, torch::kInt64);
    for (int e = 0; e < entry.counts_size(); ++e) counts.mutable_data_ptr<int64_t>()[e] = static_cast<int64_t>(entry.counts(e));
    part_.UpdateCorrection(entry.layer(), counts, options_.expert_bias_rate, options_.expert_bias_rule);
  }
}

}  // namespace moonpipe
