// Frames of a video to clips, which are the items that the K2.5 tower takes (architecture section 3.2). A clip is up to
// `frames_per_clip` consecutive sampled frames of one size, has the prompt
//
//   00:00:02.000<|media_begin|>video<|media_content|><|media_pad|><|media_end|>
//
// with the time of its first frame, and as many positions as one frame.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "moonpipe/data/image_processor.h"

namespace moonpipe {

// Which of `frames` frames, shown at `fps`, are kept: max(round(frames * min(sample_fps, fps) / fps), 1) of them, but no more than
// max_frames, spread evenly from the first to the last. Halves round to even. `frames` is at least 1, `fps` above 0.
std::vector<int64_t> SampleFrames(int64_t frames, double fps, const ClipRule& rule);

// First frame and number of frames of each clip; the last may be shorter.
std::vector<std::pair<int64_t, int64_t>> SplitIntoClips(int64_t frames, int32_t frames_per_clip);

// The time as text. Milliseconds are cut, not rounded, and hours start again after a day, as in the reference.
std::string TimestampText(double seconds, TimestampMode mode);

// The prompt of a clip, special tokens spelled out.
std::string ClipPrompt(double seconds, TimestampMode mode);

// The patch limit of one frame of a clip of `frames`: max_patches_each_frame, or less where max_patches_video is set.
int32_t FramePatchLimit(const ClipRule& rule, int64_t frames);

struct Clip {
  double seconds = 0;  // of its first frame
  PicturePatches patches;
};

// Sampled frames, all of one size, each with its time. SkipError (bad_picture) when sizes differ or a frame cannot be sized;
// INVALID_ARGUMENT for a rule without clips, no frames, or another number of times.
absl::StatusOr<std::vector<Clip>> ProcessFrames(const std::vector<RgbImage>& frames, const std::vector<double>& seconds,
                                                const PictureRule& rule);

}  // namespace moonpipe
