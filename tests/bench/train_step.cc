// One training step in one process: tower, decoder, loss, backward, AdamW, as the services take it. Driven by tests/bench/train_step.py,
// which runs it side by side with a peer: every line on stdin is one step, answered by one line of JSON; the end of stdin ends it.
//
//   train_step CONFIG.json SEQUENCE ROWS COLUMNS THREADS [none|experts|layers]
//
// The sequence begins with 8 text tokens, then the picture's placeholders, then text; all text after the first token is trained.
#include <sys/resource.h>

#include <chrono>
#include <cstdlib>
#include <iostream>

#include <torch/torch.h>

#include "moonpipe/base/file.h"
#include "moonpipe/model/decoder_part.h"
#include "moonpipe/model/fresh_weights.h"
#include "moonpipe/model/loss.h"
#include "moonpipe/model/vision_tower.h"
#include "moonpipe/runtime/main_flags.h"
#include "moonpipe/train/gradients.h"
#include "moonpipe/train/optimizer.h"

namespace moonpipe {
namespace {

using torch::Tensor;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int Bench(const std::string& config_path, int64_t sequence, int64_t rows, int64_t columns, int threads, Recompute recompute) {
  at::set_num_threads(threads);
  const auto config = ReadModelConfig(config_path);
  if (!config.ok()) {
    std::cerr << config.status() << "\n";
    return 1;
  }
  PartRange whole;
  whole.end_layer = config->text.num_hidden_layers;
  whole.has_embedding = whole.has_head = true;
  whole.has_vision = config->vision.has_value();
  ParameterStore store(*config, whole);
  ComputeOptions compute;
  compute.recompute = recompute;
  store.set_compute(compute);
  DrawFreshWeights(0, store);
  GradientAccumulator gradients(&store, 1);
  cluster::v1::OptimizerSpec spec;
  spec.set_learning_rate(1e-4);
  spec.set_beta1(0.9);
  spec.set_beta2(0.95);
  spec.set_epsilon(1e-8);
  spec.set_weight_decay(0.1);
  Optimizer optimizer(&store, spec, *AssignUpdateRules(spec, store.specs(), store.specs()));
  DecoderPart decoder(store);
  std::optional<VisionTower> tower;
  if (whole.has_vision) tower.emplace(store);

  torch::manual_seed(1);
  const int64_t media = rows * columns / 4;
  Tensor ids_T = torch::randint(8, config->text.vocab_size - 1, {sequence}, torch::kLong);
  Tensor labels_T = torch::full({sequence}, kIgnoredLabel, torch::kLong);
  if (tower.has_value()) ids_T.narrow(0, 8, media).fill_(config->media_placeholder_token_id);
  labels_T.narrow(0, 0, sequence - 1).copy_(ids_T.narrow(0, 1, sequence - 1));
  if (tower.has_value()) labels_T.masked_fill_(labels_T == config->media_placeholder_token_id, kIgnoredLabel);
  const int64_t trained = (labels_T != kIgnoredLabel).sum().item<int64_t>();
  const int64_t patch = tower.has_value() ? config->vision->patch_size : 0;
  const Tensor pixels = torch::randn({rows * columns, 3, patch, patch});

  std::string line;
  while (std::getline(std::cin, line)) {
    const double begin = Now();
    gradients.Begin();
    DecoderInput input;
    input.tokens_or_hidden = ids_T;
    input.document_lengths = {sequence};
    if (tower.has_value()) input.features_MH = tower->Forward(pixels, {{1, rows, columns}});
    input.skip_head = input.last_hidden = true;
    const DecoderOutput output = decoder.Forward(input);
    const Tensor loss = HeadCrossEntropy(output.last_hidden_TH, store.HeadWeight(), labels_T).sum / static_cast<double>(trained);
    const double forward = Now();
    loss.backward();
    gradients.Finish();
    const double backward = Now();
    optimizer.Step(1, 1);
    const double end = Now();
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    std::cout << "{\"seconds\": " << end - begin << ", \"forward\": " << forward - begin << ", \"backward\": " << backward - forward
              << ", \"optimizer\": " << end - backward << ", \"loss\": " << loss.item<double>() << ", \"peak_mib\": " << usage.ru_maxrss / 1024
              << "}" << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace moonpipe

int main(int argc, char** argv) {
  moonpipe::SetEnvironmentForDeterminism(argv);
  if (argc != 6 && argc != 7) {
    std::cerr << "usage: train_step CONFIG.json SEQUENCE ROWS COLUMNS THREADS [none|experts|layers]\n";
    return 2;
  }
  return moonpipe::Bench(argv[1], std::atoll(argv[2]), std::atoll(argv[3]), std::atoll(argv[4]), std::atoi(argv[5]),
                         moonpipe::RecomputeOf(argc == 7 ? argv[6] : "none"));
}
