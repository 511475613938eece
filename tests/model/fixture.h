// A recorded reference: its checkpoint, and per case its inputs, intermediate tensors, gradients and losses. Recorded rows are padded
// [B, S]; here they are packed documents without padding.
#pragma once

#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "moonpipe/model/decoder_part.h"
#include "moonpipe/model/loss.h"
#include "moonpipe/model/parameter_store.h"
#include "moonpipe/model/vision_tower.h"
#include "moonpipe/spec/safetensors.h"
#include "nlohmann/json.hpp"

namespace moonpipe::testing {

// Arithmetic as in production: pinned kernels, deterministic algorithms. One thread unless a test is about threads: on a busy machine
// two spin at every barrier.
void PinArithmetic(int threads = 1);

PartRange WholeModel(const ModelConfig& config);

struct FixtureCase {
  std::string name;
  torch::Tensor valid;    // int64: rows of [B * S] that hold a token
  torch::Tensor ids_T;
  torch::Tensor labels_T;  // aligned: what each row predicts
  int64_t trained = 0;
  std::vector<int64_t> document_lengths;
  torch::Tensor pixels;  // undefined for text models
  std::vector<PatchGrid> grids;
  bool has_media = false;  // false: the recorded picture is a dummy that reaches no token
};

// The loss of a forward, as the last stage takes it; `input` gets the options that it needs.
Loss LossOf(DecoderPart& decoder, const ParameterStore& store, DecoderInput input, const torch::Tensor& labels_T);

class Fixture {
 public:
  // The one of this name below tests/fixtures.
  explicit Fixture(const std::string& name);
  static Fixture InFolder(const std::string& folder);

  const ModelConfig& config() const { return config_; }
  const std::string& folder() const { return folder_; }
  const nlohmann::json& meta() const { return meta_; }
  bool Has(const std::string& name) const;
  torch::Tensor Read(const std::string& name) const;
  std::vector<std::string> NamesBelow(const std::string& prefix) const;
  FixtureCase Case(const std::string& name) const;
  ParameterStore Load(const PartRange& range) const;
  ParameterStore Load() const { return Load(WholeModel(config_)); }

 private:
  Fixture() = default;

  std::string folder_;
  ModelConfig config_;
  nlohmann::json meta_;
  std::unique_ptr<SafetensorsFile> io_;
};

}  // namespace moonpipe::testing
