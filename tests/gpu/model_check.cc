#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "moonpipe/model/hf_weights.h"
#include "moonpipe/model/loss.h"
#include "moonpipe/train/gradients.h"
#include "moonpipe/train/optimizer.h"
#include "tests/gpu/report.h"
#include "tests/model/fixture.h"

namespace moonpipe::testing {
namespace {

using torch::Tensor;
using Tensors = std::map<std::string, Tensor>;

constexpr double kLearningRate = 1e-3;
constexpr double kClipFactor = 0.5;

template <typename T>
T Expect(absl::StatusOr<T> value) {
  TORCH_CHECK(value.ok(), value.status().ToString());
  return std::move(value).value();
}

// A model on one device with its gradients and its optimizer.
class Trainee {
 public:
  Trainee(const Fixture& fixture, const torch::Device& device, torch::Dtype dtype)
      : device_(device), store_(fixture.config(), WholeModel(fixture.config()), dtype, device) {
    Expect(LoadModelFolder(fixture.folder(), store_));
    accumulator_.emplace(&store_, 1);
    decoder_.emplace(store_);
    tower_.emplace(store_);
    cluster::v1::OptimizerSpec spec;
    spec.set_learning_rate(kLearningRate);
    spec.set_beta1(0.9);
    spec.set_beta2(0.95);
    spec.set_epsilon(1e-8);
    spec.set_weight_decay(0.1);
    rules_ = Expect(AssignUpdateRules(spec, store_.specs(), store_.specs()));
    if (dtype == torch::kFloat) optimizer_.emplace(&store_, spec, rules_);
  }

  // Forward and backward; returns the mean loss. `seen` receives everything that the model shows.
  double Differentiate(const FixtureCase& input, Tensors* seen = nullptr) {
    TensorObserver observer;
    if (seen != nullptr) observer = [seen](const std::string& name, const Tensor& value) { (*seen)[name] = value.detach().cpu(); };
    tower_->set_observer(observer);
    decoder_->set_observer(observer);
    accumulator_->Begin();
    Tensor features_MH;
    if (input.has_media) features_MH = tower_->Forward(input.pixels, input.grids);
    const Tensor loss =
        testing::LossOf(*decoder_, store_, {input.ids_T.to(device_), input.document_lengths, features_MH}, input.labels_T.to(device_)).sum /
        input.trained;
    loss.backward();
    accumulator_->Finish();
    return loss.item<double>();
  }

  void Step() { optimizer_->Step(kClipFactor, 1.0); }

  Tensors Gradients() const {
    return OfTrained([this](const std::string& name) { return store_.PublishedGradient(name); });
  }
  Tensors Values() const {
    return OfTrained([this](const std::string& name) { return store_.PublishedValue(name); });
  }
  // As a checkpoint would hold them.
  Tensors Moments() const {
    Tensors moments;
    for (const StoredTensor& stored : optimizer_->State()) moments[stored.name] = Expect(ToTorch(stored));
    return moments;
  }
  Tensors SquaredNorms() const {
    worker::v1::StepReport report;
    AddGradientNorms(store_, rules_, report);
    Tensors norms;
    for (const auto& norm : report.norms()) norms[norm.name()] = torch::tensor(norm.squared_norm(), torch::kDouble);
    return norms;
  }
  void SetGradients(const Tensors& gradients) {
    for (const auto& [name, gradient] : gradients) store_.PublishedGradient(name).copy_(gradient);
  }

 private:
  Tensors OfTrained(const std::function<Tensor(const std::string&)>& get) const {
    Tensors tensors;
    for (const TensorSpec& spec : store_.specs()) {
      if (spec.trainable) tensors[spec.name] = get(spec.name).detach().cpu().clone();
    }
    return tensors;
  }

  torch::Device device_;
  ParameterStore store_;
  std::vector<UpdateRule> rules_;
  std::optional<GradientAccumulator> accumulator_;
  std::optional<DecoderPart> decoder_;
  std::optional<VisionTower> tower_;
  std::optional<Optimizer> optimizer_;
};

// |got - want| <= atol + rtol * |want| for every element; prints the largest difference and where it is.
void Compare(const std::string& what, const Tensors& got, const Tensors& want, double rtol, double atol, GpuReport& report) {
  double largest = 0;
  double excess = 0;
  std::string where;
  bool good = !want.empty() && got.size() == want.size();
  for (const auto& [name, expected] : want) {
    const auto found = got.find(name);
    if (found == got.end() || found->second.sizes() != expected.sizes()) {
      report.Add(false, absl::StrCat(what, ": ", name, " is missing or has another shape"));
      return;
    }
    if (absl::EndsWith(name, ".indices")) {
      if (!torch::equal(found->second, expected)) {
        report.Add(false, absl::StrCat(what, ": ", name, ": other experts were chosen"));
        return;
      }
      continue;
    }
    const Tensor expected64 = expected.to(torch::kDouble);
    const Tensor difference = (found->second.to(torch::kDouble) - expected64).abs();
    const double most = difference.max().item<double>();
    if (!std::isfinite(most)) good = false;
    if (!(most <= largest)) {
      largest = most;
      where = name;
    }
    excess = std::max(excess, (difference - rtol * expected64.abs()).max().item<double>());
  }
  good = good && excess <= atol;
  report.Add(good, absl::StrFormat("%s: %d tensors, largest difference %.2e (%s); bound %g + %g x", what, want.size(), largest,
                                   where, atol, rtol));
}

void CheckFp32(const Fixture& fixture, const FixtureCase& input, const torch::Device& device, GpuReport& report) {
  Trainee host(fixture, torch::kCPU, torch::kFloat);
  Trainee trainee(fixture, device, torch::kFloat);
  Tensors want, got;
  const double want_loss = host.Differentiate(input, &want);
  const double got_loss = trainee.Differentiate(input, &got);
  const auto bound = [&](const char* kind, const char* term) { return fixture.meta()["tolerances"][kind][term].get<double>(); };
  // The bounds of the recording, which leave room for another order of summation only.
  const std::string prefix = absl::StrCat("fp32 ", input.name, " ");
  Compare(prefix + "forward", got, want, bound("forward", "rtol"), bound("forward", "atol"), report);
  Compare(prefix + "loss", {{"loss", torch::tensor(got_loss)}}, {{"loss", torch::tensor(want_loss)}}, bound("loss", "rtol"),
          bound("loss", "atol"), report);
  const Tensors gradients = host.Gradients();
  Compare(prefix + "gradients", trainee.Gradients(), gradients, bound("grad", "rtol"), bound("grad", "atol"), report);
  Compare(prefix + "squared norms", trainee.SquaredNorms(), host.SquaredNorms(), 2 * bound("grad", "rtol"), 1e-9, report);

  // From equal gradients: AdamW's first step turns a gradient near zero into its sign, which would magnify the noise of the backward.
  trainee.SetGradients(gradients);
  host.Step();
  trainee.Step();
  Compare(prefix + "moments", trainee.Moments(), host.Moments(), 1e-6, 1e-12, report);
  Compare(prefix + "weights after AdamW", trainee.Values(), host.Values(), 1e-6, 1e-3 * kLearningRate, report);
  Compare(prefix + "loss after AdamW", {{"loss", torch::tensor(trainee.Differentiate(input))}},
          {{"loss", torch::tensor(host.Differentiate(input))}}, bound("adamw_losses", "rtol"), bound("adamw_losses", "atol"), report);
}

// bf16 keeps 8 bits, and a router may choose another expert for a token near a tie, so the bounds are loose: the loss, and the angle
// between all gradients of one case in bf16 and in fp32.
void CheckBf16(const Fixture& fixture, const FixtureCase& input, const torch::Device& device, GpuReport& report) {
  constexpr double kLossBound = 0.02;
  constexpr double kCosineBound = 0.98;
  Trainee host(fixture, torch::kCPU, torch::kFloat);
  Trainee trainee(fixture, device, torch::kBFloat16);
  const double want_loss = host.Differentiate(input);
  const double got_loss = trainee.Differentiate(input);
  const Tensors want = host.Gradients();
  const Tensors got = trainee.Gradients();
  double product = 0, want_square = 0, got_square = 0;
  for (const auto& [name, gradient] : want) {
    const Tensor expected = gradient.to(torch::kDouble).flatten();
    const Tensor actual = got.at(name).to(torch::kDouble).flatten();
    product += expected.dot(actual).item<double>();
    want_square += expected.dot(expected).item<double>();
    got_square += actual.dot(actual).item<double>();
  }
  const double cosine = product / std::sqrt(want_square * got_square);
  const double loss_error = std::abs(got_loss - want_loss) / want_loss;
  report.Add(loss_error <= kLossBound, absl::StrFormat("bf16 %s loss: %.5f, fp32 has %.5f, off by %.2e; bound %g", input.name, got_loss,
                                                       want_loss, loss_error, kLossBound));
  report.Add(cosine >= kCosineBound,
             absl::StrFormat("bf16 %s gradients: cosine with fp32 %.5f, norm %.5f and %.5f; bound %g", input.name, cosine,
                             std::sqrt(got_square), std::sqrt(want_square), kCosineBound));
}

void CheckRepeat(const Fixture& fixture, const FixtureCase& input, const torch::Device& device, torch::Dtype dtype, GpuReport& report) {
  const std::string what = absl::StrCat("two ", c10::toString(dtype), " runs of ", input.name);
  std::vector<Tensors> runs;
  for (int run = 0; run < 2; ++run) {
    Trainee trainee(fixture, device, dtype);
    Tensors& seen = runs.emplace_back();
    const double loss = trainee.Differentiate(input, &seen);
    seen["loss"] = torch::tensor(loss, torch::kDouble);
    for (const auto& [name, gradient] : trainee.Gradients()) seen["grad/" + name] = gradient;
    if (dtype != torch::kFloat) continue;
    trainee.Step();
    for (const auto& [name, value] : trainee.Values()) seen["stepped/" + name] = value;
  }
  std::vector<std::string> different;
  for (const auto& [name, value] : runs[0]) {
    if (!torch::equal(value, runs[1].at(name))) different.push_back(name);
  }
  report.Add(different.empty(), different.empty()
                                    ? absl::StrCat(what, ": equal in every bit of ", runs[0].size(), " tensors")
                                    : absl::StrCat(what, ": ", different.size(), " of ", runs[0].size(),
                                                   " tensors differ, the first by name is ", different.front()));
}

double MedianMilliseconds(const torch::Device& device, int repeats, const std::function<void()>& work) {
  std::vector<double> times;
  for (int i = 0; i < repeats + 3; ++i) {
    const absl::Time begin = absl::Now();
    work();
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
    if (i >= 3) times.push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
  }
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  return times[static_cast<size_t>(repeats / 2)];
}

void MeasureStep(const Fixture& fixture, const FixtureCase& input, const torch::Device& device, GpuReport& report) {
  Trainee trainee(fixture, device, torch::kFloat);
  const double gradients = MedianMilliseconds(device, 10, [&] { trainee.Differentiate(input); });
  const double step = MedianMilliseconds(device, 10, [&] { trainee.Step(); });
  report.Note(absl::StrFormat("time of %s on %s: forward and backward %.2f ms, AdamW %.2f ms (medians of 10)", input.name, device.str(),
                              gradients, step));
}

// The message of an operation that has no deterministic kernel names it.
bool RunsDeterministically(const std::function<void()>& work, GpuReport& report) {
  try {
    work();
    return true;
  } catch (const c10::Error& error) {
    const std::string words = error.what_without_backtrace();
    if (!absl::StrContains(words, "deterministic")) throw;
    report.Add(false, absl::StrCat("an operation is not deterministic: ", words.substr(0, words.find('\n'))));
    return false;
  }
}

}  // namespace

void CheckModel(const std::string& fixture_folder, const std::string& device_name, GpuReport& report) {
  const Fixture fixture = Fixture::InFolder(fixture_folder);
  const torch::Device device(device_name);
  std::vector<FixtureCase> cases;
  for (const char* name : {"two_images", "text_only", "packed"}) cases.push_back(fixture.Case(name));
  for (const torch::Dtype dtype : {torch::kFloat, torch::kBFloat16}) {
    const auto once = [&] { Trainee(fixture, device, dtype).Differentiate(cases.front()); };
    // The rest still tells something when an operation is refused.
    if (!RunsDeterministically(once, report)) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  }
  for (const FixtureCase& input : cases) CheckFp32(fixture, input, device, report);
  for (const FixtureCase& input : cases) CheckBf16(fixture, input, device, report);
  for (const FixtureCase& input : cases) CheckRepeat(fixture, input, device, torch::kFloat, report);
  CheckRepeat(fixture, cases.front(), device, torch::kBFloat16, report);
  MeasureStep(fixture, cases.front(), torch::kCPU, report);
  if (device.is_cuda()) MeasureStep(fixture, cases.front(), device, report);
}

}  // namespace moonpipe::testing
