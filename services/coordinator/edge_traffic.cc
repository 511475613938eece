#include "services/coordinator/edge_traffic.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace moonpipe {

std::map<std::string, uint64_t> ExpectedEdgeBytes(const ClusterPlan& plan,
                                                  const data::v1::StepManifest& manifest, const ModelConfig& config) {
  uint64_t tokens = 0, rows = 0;
  for (const auto& microbatch : manifest.microbatches()) {
    tokens += microbatch.tokens();
    rows += microbatch.feature_rows();
  }
  const uint64_t row_bytes = static_cast<uint64_t>(config.text.hidden_size) * sizeof(float);
  std::map<std::string, uint64_t> expected;
  for (const auto& [worker, part] : plan.plans) {
    for (const worker::v1::EdgePlan& edge : part.edges()) {
      if (absl::StartsWith(edge.name(), "tied-")) {
        expected[edge.name()] = static_cast<uint64_t>(config.text.vocab_size) * row_bytes;
      } else if (absl::StartsWith(edge.name(), "feature")) {
        expected[edge.name()] = rows * row_bytes;
      } else {
        expected[edge.name()] = tokens * row_bytes;
      }
    }
  }
  return expected;
}

absl::Status CheckEdgeTraffic(const ClusterPlan& plan, const data::v1::StepManifest& manifest,
                              const ModelConfig& config, const std::map<uint32_t, worker::v1::StepReport>& reports) {
  const std::map<std::string, uint64_t> expected = ExpectedEdgeBytes(plan, manifest, config);
  for (const auto& [worker, report] : reports) {
    for (const worker::v1::EdgeBytes& edge : report.edges()) {
      auto bytes = expected.find(edge.edge());
      if (bytes == expected.end() || bytes->second != edge.payload_bytes()) {
        return absl::InternalError(absl::StrCat("worker ", worker, " counted ", edge.payload_bytes(), " bytes on edge ", edge.edge(),
                                                " in step ", manifest.step(), ", the manifest demands ",
                                                bytes == expected.end() ? 0 : bytes->second));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace moonpipe
