// Compares what a run computed with a recording: the tensors of one case of a fixture (config.json, model.safetensors, io.safetensors,
// meta.json), element by element within the fixture's own tolerances, |a - b| <= atol + rtol * |b|.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "moonpipe/data/batch_source.h"
#include "moonpipe/spec/model_config.h"
#include "moonpipe/spec/safetensors.h"
#include "nlohmann/json.hpp"

namespace moonpipe {

struct ParityTolerance {
  double rtol = 0, atol = 0;
};

class ParityFixture {
 public:
  // Reads the folder but for its weights. Errors name the file.
  static absl::StatusOr<ParityFixture> Open(const std::string& folder);

  const std::string& folder() const { return folder_; }
  const ModelConfig& config() const { return config_; }
  const SafetensorsFile& recording() const { return *recording_; }
  std::string recording_path() const { return folder_ + "/io.safetensors"; }
  std::vector<std::string> cases() const { return BatchCases(*recording_); }
  bool Has(const std::string& name) const { return recording_->Find(name).ok(); }

  // The recorded optimizer settings; steps 0 where meta.json has none.
  struct AdamW {
    double learning_rate = 0, beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0;
    uint64_t steps = 0;
  };
  const AdamW& adamw() const { return adamw_; }
  // Of "forward", "logits", "loss", "grad" or "adamw_losses". INVALID_ARGUMENT where meta.json lacks it.
  absl::StatusOr<ParityTolerance> Tolerance(const std::string& kind) const;
  // What each entry of CASE/grad_norms is the norm of.
  const std::vector<std::string>& grad_norm_names() const { return grad_norm_names_; }

 private:
  std::string folder_;
  ModelConfig config_;
  std::optional<SafetensorsFile> recording_;
  std::map<std::string, ParityTolerance> tolerances_;
  std::vector<std::string> grad_norm_names_;
  AdamW adamw_;
};

// What a run left of a case.
struct ParityRun {
  std::string observed_folder;  // worker-*.safetensors of the first step
  std::vector<double> losses;   // of each step, before its update
  std::string checkpoint;       // after adamw().steps steps; empty where none were taken
};

// One kind of tensors.
struct ParityGroup {
  std::string name;  // "vision tower", "layer 2", "gradients of the decoder"
  int tensors = 0;
  double largest = 0;   // difference
  std::string worst;    // the tensor that has it
  int failed = 0;
};

struct ParityResult {
  std::string name;  // of the case
  std::vector<ParityGroup> groups;
  std::vector<std::string> failures;  // one a tensor, a sentence each
  std::optional<double> vision_cosine;   // least cosine between a feature row and its recording
  std::optional<double> last_token_kl;   // largest divergence of the next-token distribution at a document's last token
  std::optional<double> top1_agreement;  // of the most likely next token, over all tokens
  std::optional<double> top5_agreement;  // mean share of the five most likely that both have

  nlohmann::ordered_json ToJson() const;
};

// A recorded tensor that was not produced, or has another shape, is a failure like one beyond its tolerance. Errors are those of files.
absl::StatusOr<ParityResult> CompareCase(const ParityFixture& fixture, const std::string& batch_case, const ParityRun& run);

// Writes the recorded choices of the router as a step reads them (RunStep.pinned_routing): `router.LAYER.indices`, int64 [tokens, chosen],
// of the packed tokens, ascending. INVALID_ARGUMENT where the case has none.
absl::Status WritePinnedRouting(const ParityFixture& fixture, const std::string& batch_case, const std::string& path);

}  // namespace moonpipe
