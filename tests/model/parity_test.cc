// The whole model against recorded tensors of the reference implementations: every stage of the forward, the loss, every gradient, and
// the losses of five AdamW steps. Bounds come with the recording and leave room for another order of summation only. Each test prints
// the largest difference of every group.
#include <torch/torch.h>

#include <cstdio>
#include <map>
#include <regex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "moonpipe/model/loss.h"
#include "tests/model/fixture.h"

namespace moonpipe {
namespace {

using testing::Fixture;
using testing::FixtureCase;
using torch::Tensor;

// Runs a case and keeps everything that the model shows.
struct Pass {
  std::map<std::string, Tensor> seen;
  Tensor loss;  // mean over trained labels
  Tensor nll_T;
};

Pass Forward(const FixtureCase& input, VisionTower* tower, DecoderPart& decoder, const ParameterStore& store) {
  Pass run;
  const TensorObserver observer = [&run](const std::string& name, const Tensor& value) { run.seen[name] = value.detach(); };
  decoder.set_observer(observer);
  Tensor features_MH;
  if (tower != nullptr) {
    tower->set_observer(observer);
    const Tensor all_MH = tower->Forward(input.pixels, input.grids);
    if (input.has_media) features_MH = all_MH;
  }
  const Loss loss = testing::LossOf(decoder, store, {input.ids_T, input.document_lengths, features_MH}, input.labels_T);
  run.loss = loss.sum / input.trained;
  run.nll_T = loss.nll_T;
  decoder.set_observer({});
  if (tower != nullptr) tower->set_observer({});
  return run;
}

class Comparison {
 public:
  explicit Comparison(const Fixture& fixture) : fixture_(fixture) {}
  ~Comparison() {
    for (const auto& [group, largest] : largest_) std::printf("  %-28s largest difference %.2e\n", group.c_str(), largest);
  }

  void Check(const std::string& kind, const std::string& name, const Tensor& got, const Tensor& want) {
    ASSERT_EQ(got.sizes(), want.sizes()) << name;
    const nlohmann::json& bound = fixture_.meta()["tolerances"][kind];
    Check(name, got, want, bound["rtol"].get<double>(), bound["atol"].get<double>());
  }
  void Check(const std::string& name, const Tensor& got, const Tensor& want, double rtol, double atol) {
    const Tensor difference = (got.to(torch::kDouble) - want.to(torch::kDouble)).abs();
    const double largest = difference.max().item<double>();
    const double excess = (difference - rtol * want.to(torch::kDouble).abs()).max().item<double>();
    const std::string group = std::regex_replace(name, std::regex("^(grad/).*|\\.[0-9]+"), "$1");
    largest_[group] = std::max(largest_[group], largest);
    EXPECT_LE(excess, atol) << name << ": largest difference " << largest << ", rtol " << rtol << ", atol " << atol;
    EXPECT_TRUE(std::isfinite(largest)) << name;
  }

 private:
  const Fixture& fixture_;
  std::map<std::string, double> largest_;
};

class ParityTest : public ::testing::TestWithParam<std::pair<std::string, std::string>> {
 protected:
  ParityTest() { testing::PinArithmetic(); }
};

TEST_P(ParityTest, EveryStageAndEveryGradientEqualsTheReference) {
  const Fixture fixture(GetParam().first);
  const std::string prefix = GetParam().second + "/";
  const FixtureCase input = fixture.Case(GetParam().second);
  ParameterStore store = fixture.Load();
  store.ZeroGradients();
  DecoderPart decoder(store);
  std::optional<VisionTower> tower;
  if (fixture.config().vision.has_value()) tower.emplace(store);
  const Pass run = Forward(input, tower.has_value() ? &*tower : nullptr, decoder, store);
  run.loss.backward();

  Comparison comparison(fixture);
  for (const std::string& name : fixture.NamesBelow(prefix + "out/")) {
    Tensor want = fixture.Read(prefix + "out/" + name);
    const bool per_token = !absl::StartsWith(name, "vision.") && name != "projected" && name != "loss";
    if (per_token) {
      if (!absl::StartsWith(name, "router.")) want = want.flatten(0, 1);
      want = want.index_select(0, input.valid);
    }
    if (name == "loss") {
      comparison.Check("loss", name, run.loss.detach().reshape({1}), want);
      continue;
    }
    if (name == "token_nll") {
      comparison.Check("logits", name, run.nll_T, want);
      continue;
    }
    ASSERT_TRUE(run.seen.count(name)) << name;
    const Tensor& got = run.seen.at(name);
    if (absl::EndsWith(name, ".indices")) {
      EXPECT_TRUE(torch::equal(got, want)) << name << ": " << (got != want).sum().item<int64_t>() << " choices differ";
    } else {
      comparison.Check(name == "logits" ? "logits" : "forward", name, got, want);
    }
  }
  for (const std::string& name : fixture.NamesBelow(prefix + "grad/")) {
    comparison.Check("grad", "grad/" + name, store.PublishedGradient(name), fixture.Read(prefix + "grad/" + name));
  }
  std::vector<Tensor> norms;
  for (const nlohmann::json& name : fixture.meta()["grad_norm_names"]) norms.push_back(store.PublishedGradient(name.get<std::string>()).norm());
  comparison.Check("grad", "grad_norms", torch::stack(norms), fixture.Read(prefix + "grad_norms"));
  if (!input.has_media) {
    for (const Parameter& parameter : store.parameters()) {
      if (parameter.published.front().part != ModelPartKind::kDecoder) {
        EXPECT_EQ(parameter.value.grad().abs().max().item<float>(), 0) << parameter.name;
      }
    }
  }
}

TEST_P(ParityTest, FiveAdamWStepsGiveTheLossesOfTheReference) {
  const Fixture fixture(GetParam().first);
  const std::string prefix = GetParam().second + "/";
  if (!fixture.Has(prefix + "adamw/losses")) GTEST_SKIP() << "no optimizer steps were recorded for this case";
  const FixtureCase input = fixture.Case(GetParam().second);
  ParameterStore store = fixture.Load();
  DecoderPart decoder(store);
  std::optional<VisionTower> tower;
  if (fixture.config().vision.has_value()) tower.emplace(store);
  std::vector<Tensor> trained;
  for (const Parameter& parameter : store.parameters()) {
    if (parameter.trainable) trained.push_back(parameter.value);
  }
  const nlohmann::json& settings = fixture.meta()["adamw"];
  torch::optim::AdamW optimizer(trained, torch::optim::AdamWOptions(settings["lr"].get<double>())
                                             .betas({settings["betas"][0].get<double>(), settings["betas"][1].get<double>()})
                                             .eps(settings["eps"].get<double>())
                                             .weight_decay(settings["weight_decay"].get<double>()));
  std::vector<Tensor> losses;
  for (int step = 0; step <= settings["steps"].get<int>(); ++step) {
    store.ZeroGradients();
    const Pass run = Forward(input, tower.has_value() ? &*tower : nullptr, decoder, store);
    losses.push_back(run.loss.detach());
    if (step == settings["steps"].get<int>()) break;
    run.loss.backward();
    optimizer.step();
  }
  Comparison comparison(fixture);
  comparison.Check("adamw_losses", "adamw/losses", torch::stack(losses), fixture.Read(prefix + "adamw/losses"));
  // AdamW moves every weight by about the learning rate per step whatever its gradient, so the bound is relative to the rate.
  for (const std::string& name : fixture.NamesBelow(prefix + "adamw/param/")) {
    comparison.Check("adamw/param", store.PublishedValue(name), fixture.Read(prefix + "adamw/param/" + name), 0, 0.5 * settings["lr"].get<double>());
  }
}

INSTANTIATE_TEST_SUITE_P(Recorded, ParityTest,
                         ::testing::Values(std::pair("kimi_vl_a3b", "two_images"), std::pair("kimi_vl_a3b", "text_only"),
                                           std::pair("kimi_vl_a3b", "packed"), std::pair("moonlight", "padded"),
                                           std::pair("moonlight", "packed"), std::pair("kimi_k2_5", "two_images"),
                                           std::pair("kimi_k2_5", "text_only"), std::pair("kimi_k2_5", "video"),
                                           std::pair("kimi_k2_5", "packed")),
                         [](const auto& instance) { return absl::StrCat(instance.param.first, "_", instance.param.second); });

}  // namespace
}  // namespace moonpipe
