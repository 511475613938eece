#include "tests/model/fixture.h"

#include <cstdlib>

#include "absl/strings/match.h"
#include "moonpipe/base/file.h"
#include "moonpipe/model/hf_weights.h"
#include "moonpipe/model/loss.h"

namespace moonpipe::testing {
namespace {

template <typename T>
T Expect(absl::StatusOr<T> value) {
  TORCH_CHECK(value.ok(), value.status().ToString());
  return std::move(value).value();
}

// Before any of torch runs, as the services do in the first lines of main.
const bool kPinned = [] {
  setenv("MKL_CBWR", "AVX2", 1);
  setenv("ATEN_CPU_CAPABILITY", "avx2", 1);
  return true;
}();

}  // namespace

void PinArithmetic(int threads) {
  TORCH_CHECK(kPinned);
  at::set_num_threads(threads);
  at::globalContext().setDeterministicAlgorithms(true, false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

PartRange WholeModel(const ModelConfig& config) {
  PartRange range;
  range.end_layer = config.text.num_hidden_layers;
  range.has_embedding = range.has_head = true;
  range.has_vision = config.vision.has_value();
  return range;
}

Fixture::Fixture(const std::string& name) : Fixture(InFolder(std::string(TEST_DATA_DIR) + "/fixtures/" + name)) {}

Fixture Fixture::InFolder(const std::string& folder) {
  Fixture fixture;
  fixture.folder_ = folder;
  fixture.config_ = Expect(ReadModelConfig(folder + "/config.json"));
  fixture.meta_ = nlohmann::json::parse(Expect(ReadFile(folder + "/meta.json")));
  fixture.io_ = std::make_unique<SafetensorsFile>(Expect(SafetensorsFile::Open(folder + "/io.safetensors")));
  return fixture;
}

Loss LossOf(DecoderPart& decoder, const ParameterStore& store, DecoderInput input, const torch::Tensor& labels_T) {
  input.skip_head = input.last_hidden = true;
  return HeadCrossEntropy(decoder.Forward(input).last_hidden_TH, store.HeadWeight(), labels_T);
}

bool Fixture::Has(const std::string& name) const { return io_->Find(name).ok(); }

torch::Tensor Fixture::Read(const std::string& name) const { return Expect(ToTorch(*Expect(io_->Find(name)))); }

std::vector<std::string> Fixture::NamesBelow(const std::string& prefix) const {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : io_->tensors()) {
    if (absl::StartsWith(tensor.name, prefix)) names.push_back(tensor.name.substr(prefix.size()));
  }
  return names;
}

FixtureCase Fixture::Case(const std::string& name) const {
  FixtureCase out;
  out.name = name;
  const torch::Tensor ids = Read(name + "/in/input_ids");
  const torch::Tensor documents = Read(name + "/in/attention_mask");
  const torch::Tensor labels = Read(name + "/in/labels");
  const int64_t length = ids.size(1);
  out.valid = (documents.flatten() > 0).nonzero().flatten();
  out.ids_T = ids.flatten().index_select(0, out.valid);
  torch::Tensor shifted = torch::full_like(labels, kIgnoredLabel);
  shifted.narrow(1, 0, length - 1).copy_(labels.narrow(1, 1, length - 1));
  out.labels_T = shifted.flatten().index_select(0, out.valid);
  out.trained = (out.labels_T != kIgnoredLabel).sum().item<int64_t>();
  const auto document = documents.accessor<int64_t, 2>();
  for (int64_t row = 0; row < documents.size(0); ++row) {
    for (int64_t i = 0; i < length && document[row][i] > 0; ++i) {
      if (i == 0 || document[row][i] != document[row][i - 1]) out.document_lengths.push_back(0);
      out.document_lengths.back() += 1;
    }
  }
  if (Has(name + "/in/pixel_values")) {
    out.pixels = Read(name + "/in/pixel_values");
    const torch::Tensor grids = Read(name + "/in/grid_thws");
    for (int64_t i = 0; i < grids.size(0); ++i) {
      out.grids.push_back({grids[i][0].item<int64_t>(), grids[i][1].item<int64_t>(), grids[i][2].item<int64_t>()});
    }
    out.has_media = (out.ids_T == config_.media_placeholder_token_id).any().item<bool>();
  }
  return out;
}

ParameterStore Fixture::Load(const PartRange& range) const {
  ParameterStore store(config_, range);
  Expect(LoadModelFolder(folder_, store));
  return store;
}

}  // namespace moonpipe::testing
