// preprocessor_config.json of a Kimi checkpoint: the limits of its pictures and clips. They have no defaults here; a picture's size is
// the checkpoint's decision.
//
// Kimi-VL, at the top level: patch_size, merge_kernel_size, in_token_limit, image_mean, image_std required; pad_input (true) optional.
// K2.5, under media_proc_cfg: patch_size, merge_kernel_size, in_patch_limit, patch_limit_on_one_side, in_patch_limit_each_frame,
// sample_fps, temporal_merge_kernel_size, image_mean, image_std required; in_patch_limit_video, max_num_frames_each_video,
// fixed_output_tokens (null), timestamp_mode ("hh:mm:ss.fff"), transparent_bg_config (null) optional.
// Either: merge_kernel_size is one number or two equal ones. Means and deviations other than 0.5 are refused, for the tower normalises
// with these. Fields that are not named here are left alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "moonpipe/data/picture_rule.h"
#include "moonpipe/spec/model_config.h"

namespace moonpipe {

// `architecture` picks the form. INVALID_ARGUMENT lists every missing, mistyped or unsupported field by its path, all at once.
absl::StatusOr<PictureRule> ParsePreprocessorConfig(absl::string_view json, Architecture architecture);

// The rule of a run. The first of `folders` with a preprocessor_config.json gives it, and it must agree with the model's vision_config,
// else INVALID_ARGUMENT names both fields with both numbers. `max_patches`, where set, replaces the file's patch limit; without a file
// it must be set, and K2.5 then has a side limit of 512 and no clips. A model without a vision tower has a rule of no limit.
absl::StatusOr<PictureRule> ResolvePictureRule(const ModelConfig& model, const std::vector<std::string>& folders,
                                               std::optional<uint32_t> max_patches);

}  // namespace moonpipe
