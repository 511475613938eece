#include <algorithm>
#include <cstdint>

#include "moonpipe/config/run_file.h"

namespace moonpipe {

// The fields stand in the order of the proto.
#define DEFAULT_TO(message, field, value) \
  if (!(message)->has_##field()) (message)->set_##field(value)

void ResolveDefaults(cluster::v1::TrainingRunSpec* spec) {
  using cluster::v1::LearningRateSchedule;
  using cluster::v1::VisionSpec;

  DEFAULT_TO(spec->mutable_model(), keep_quantised, false);

  auto* data = spec->mutable_data();
  DEFAULT_TO(data, chat_template, "kimi-vl");
  DEFAULT_TO(data, packing_window, 256);
  DEFAULT_TO(data, too_long, "drop");
  DEFAULT_TO(data, allow_outside_paths, false);
  DEFAULT_TO(data, random_shift_pixels, 0u);
  DEFAULT_TO(data, random_rotation_degrees, 0.0);
  DEFAULT_TO(data, random_scale, 0.0);

  auto* pipeline = spec->mutable_pipeline();
  DEFAULT_TO(pipeline, stages, 2);
  DEFAULT_TO(pipeline, schedule, "1f1b");
  DEFAULT_TO(pipeline, microbatches, 4);

  auto* vision = spec->mutable_vision();
  if (vision->placement() == VisionSpec::PLACEMENT_UNSPECIFIED) vision->set_placement(VisionSpec::PLACEMENT_SERVICE);

  auto* train = spec->mutable_train();
  DEFAULT_TO(train, seed, 0);
  DEFAULT_TO(train, gradient_groups, 1);
  DEFAULT_TO(train, max_grad_norm, 1.0);
  DEFAULT_TO(train, expert_bias_rate, 0.001);
  DEFAULT_TO(train, step_idle_parts, true);

  auto* optimizer = spec->mutable_optimizer();
  DEFAULT_TO(optimizer, beta1, 0.9);
  DEFAULT_TO(optimizer, beta2, 0.95);
  DEFAULT_TO(optimizer, epsilon, 1e-8);
  DEFAULT_TO(optimizer, weight_decay, 0.1);
  auto* schedule = optimizer->mutable_schedule();
  if (schedule->kind() == LearningRateSchedule::KIND_UNSPECIFIED) schedule->set_kind(LearningRateSchedule::KIND_COSINE);
  DEFAULT_TO(schedule, warmup_steps, 0);
  DEFAULT_TO(schedule, min_ratio, 0.1);
  if (schedule->kind() == LearningRateSchedule::KIND_WSD) {
    DEFAULT_TO(schedule, decay_steps, std::max<uint64_t>(train->steps() / 5, 1));
  }
  for (auto& group : *optimizer->mutable_groups()) {
    DEFAULT_TO(&group, name, group.match());
    DEFAULT_TO(&group, frozen, false);
  }

  auto* checkpoint = spec->mutable_checkpoint();
  DEFAULT_TO(checkpoint, every_steps, 0);
  DEFAULT_TO(checkpoint, keep_last, 2);
  DEFAULT_TO(checkpoint, resume, "auto");

  DEFAULT_TO(spec->mutable_eval(), max_answer_tokens, 16);

  auto* runtime = spec->mutable_runtime();
  DEFAULT_TO(runtime, compute_threads, 1);
  DEFAULT_TO(runtime, heartbeat_timeout_seconds, 10.0);
  DEFAULT_TO(runtime, step_timeout_seconds, 12.0);
  DEFAULT_TO(runtime, start_timeout_seconds, 120.0);
  DEFAULT_TO(runtime, save_timeout_seconds, 60.0);
  DEFAULT_TO(runtime, max_edge_message_bytes, uint64_t{1} << 30);
}

#undef DEFAULT_TO

}  // namespace moonpipe
