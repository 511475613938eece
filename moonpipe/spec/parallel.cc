#include "moonpipe/spec/parallel.h"

#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace moonpipe {
namespace {

bool IsSharedByHeadsOrWidth(absl::string_view name) {
  // kv_a_proj_with_mqa and q_a_proj make the latent vectors that every head reads.
  for (const char* part : {".q_proj.", ".q_b_proj.", ".kv_b_proj.", ".o_proj.", ".gate_proj.", ".up_proj.", ".down_proj.",
                           "embed_tokens.", "lm_head."}) {
    if (absl::StrContains(name, part)) return true;
  }
  return false;
}

}  // namespace

std::string NearestDivisors(int64_t number, int64_t wanted) {
  std::vector<int64_t> near;
  for (int64_t below = std::min(wanted - 1, number); below >= 1; --below) {
    if (number % below == 0) {
      near.push_back(below);
      break;
    }
  }
  for (int64_t above = std::max<int64_t>(wanted + 1, 1); above <= number; ++above) {
    if (number % above == 0) {
      near.push_back(above);
      break;
    }
  }
  return absl::StrJoin(near, " and ");
}

std::vector<std::string> CheckParallel(const ModelConfig& config, const ParallelSizes& parallel, int64_t microbatches,
                                       int64_t microbatch_tokens) {
  const TextConfig& text = config.text;
  std::vector<std::string> problems;
  const auto at_least_one = [&](absl::string_view name, int64_t size) {
    if (size >= 1) return true;
    problems.push_back(absl::StrCat(name, " is ", size, "; the least is 1"));
    return false;
  };
  // All sizes first: what follows divides by them.
  bool positive = at_least_one("data", parallel.data);
  positive = at_least_one("expert", parallel.expert) && positive;
  positive = at_least_one("tensor", parallel.tensor) && positive;
  positive = at_least_one("context", parallel.context) && positive;
  positive = at_least_one("microbatches", microbatches) && positive;
  positive = at_least_one("microbatch_tokens", microbatch_tokens) && positive;
  if (!positive) return problems;

  const auto nearest = [](int64_t number, int64_t wanted) {
    const std::string near = NearestDivisors(number, wanted);
    return absl::StrCat("; the nearest that ", absl::StrContains(near, "and") ? "fit are " : "fits is ", near);
  };
  if (text.n_routed_experts % parallel.expert != 0) {
    problems.push_back(absl::StrCat("expert ", parallel.expert, " does not divide n_routed_experts ", text.n_routed_experts,
                                    nearest(text.n_routed_experts, parallel.expert)));
  }
  std::vector<std::pair<const char*, int64_t>> widths = {{"num_attention_heads", text.num_attention_heads},
                                                         {"intermediate_size", text.intermediate_size},
                                                         {"moe_intermediate_size", text.moe_intermediate_size},
                                                         {"vocab_size", text.vocab_size}};
  int64_t common = 0;
  for (const auto& [name, width] : widths) common = std::gcd(common, width);
  for (const auto& [name, width] : widths) {
    if (width % parallel.tensor == 0) continue;
    problems.push_back(absl::StrCat("tensor ", parallel.tensor, " does not divide ", name, " ", width, nearest(common, parallel.tensor)));
    break;
  }
  if (microbatch_tokens % parallel.context != 0) {
    problems.push_back(absl::StrCat("context ", parallel.context, " does not divide microbatch_tokens ", microbatch_tokens,
                                    nearest(microbatch_tokens, parallel.context)));
  }
  if (microbatches % parallel.replicas() != 0) {
    // The size a person typed is the one to mend; without expert parallelism that is `data`.
    const int64_t replicas = parallel.replicas();
    const int64_t below = microbatches / replicas * replicas;
    problems.push_back(absl::StrCat("data ", parallel.data, parallel.expert > 1 ? absl::StrCat(" x expert ", parallel.expert, " = ", replicas) : "",
                                    " does not divide microbatches ", microbatches, nearest(microbatches, replicas),
                                    ", or ", below > 0 ? absl::StrCat(below, " or ") : "", below + replicas, " microbatches"));
  }
  return problems;
}

int64_t ElementsPerDevice(const TensorSpec& tensor, const ParallelSizes& parallel) {
  int64_t elements = tensor.num_elements();
  if (tensor.expert >= 0) elements /= parallel.expert;
  if (tensor.part == ModelPartKind::kDecoder && IsSharedByHeadsOrWidth(tensor.name)) elements /= parallel.tensor;
  return elements;
}

}  // namespace moonpipe
