#include "moonpipe/data/video.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/skip.h"

namespace moonpipe {
namespace {

int64_t RoundToEven(double value) { return static_cast<int64_t>(std::nearbyint(value)); }

}  // namespace

std::vector<int64_t> SampleFrames(int64_t frames, double fps, const ClipRule& rule) {
  const double kept_fps = std::min(rule.sample_fps, fps);
  int64_t count = std::max(RoundToEven(static_cast<double>(frames) * kept_fps / fps), int64_t{1});
  if (rule.max_frames.has_value()) count = std::min(count, int64_t{*rule.max_frames});
  std::vector<int64_t> indices(static_cast<size_t>(count), 0);
  const double step = count > 1 ? static_cast<double>(frames - 1) / static_cast<double>(count - 1) : 0;
  for (int64_t i = 1; i < count; ++i) {
    // The end is exact, whatever the step's rounding.
    indices[static_cast<size_t>(i)] = i + 1 == count ? frames - 1 : RoundToEven(static_cast<double>(i) * step);
  }
  return indices;
}

std::vector<std::pair<int64_t, int64_t>> SplitIntoClips(int64_t frames, int32_t frames_per_clip) {
  std::vector<std::pair<int64_t, int64_t>> clips;
  for (int64_t first = 0; first < frames; first += frames_per_clip) clips.emplace_back(first, std::min<int64_t>(frames_per_clip, frames - first));
  return clips;
}

std::string TimestampText(double seconds, TimestampMode mode) {
  const auto whole = static_cast<int64_t>(std::floor(seconds));
  const auto millis = static_cast<int64_t>((seconds - std::floor(seconds)) * 1000);
  const std::string minutes = absl::StrFormat("%02d:%02d", whole / 60 % 60, whole % 60);
  switch (mode) {
    case TimestampMode::kMinutes:
      return minutes;
    case TimestampMode::kMinutesMillis:
      return absl::StrFormat("%s.%03d", minutes, millis);
    case TimestampMode::kHoursMillis:
      break;
  }
  return absl::StrFormat("%02d:%s.%03d", whole / 3600 % 24, minutes, millis);
}

std::string ClipPrompt(double seconds, TimestampMode mode) {
  return absl::StrCat(TimestampText(seconds, mode), "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>");
}

int32_t FramePatchLimit(const ClipRule& rule, int64_t frames) {
  if (!rule.max_patches_video.has_value()) return rule.max_patches_each_frame;
  const int64_t share = RoundToEven(static_cast<double>(*rule.max_patches_video) / static_cast<double>(frames));
  return static_cast<int32_t>(std::min<int64_t>(share, rule.max_patches_each_frame));
}

absl::StatusOr<std::vector<Clip>> ProcessFrames(const std::vector<RgbImage>& frames, const std::vector<double>& seconds,
                                                const PictureRule& rule) {
  if (!rule.clips.has_value()) return absl::InvalidArgumentError("the model takes no video: its preprocessor's configuration has no clips");
  if (frames.empty() || seconds.size() != frames.size()) {
    return absl::InvalidArgumentError(absl::StrCat("a video of ", frames.size(), " frames with ", seconds.size(), " times"));
  }
  std::vector<Clip> clips;
  for (const auto& [first, count] : SplitIntoClips(static_cast<int64_t>(frames.size()), rule.clips->frames_per_clip)) {
    PictureRule frame_rule = rule;
    frame_rule.max_patches = FramePatchLimit(*rule.clips, count);
    Clip clip{seconds[static_cast<size_t>(first)], {}};
    for (int64_t i = first; i < first + count; ++i) {
      const RgbImage& frame = frames[static_cast<size_t>(i)];
      if (frame.width != frames[0].width || frame.height != frames[0].height) {
        return SkipError(kBadPicture, absl::StrCat("frame ", i, " has ", frame.width, "x", frame.height, " pixels, frame 0 has ",
                                                   frames[0].width, "x", frames[0].height));
      }
      MOONPIPE_ASSIGN_OR_RETURN(PicturePatches patches, ProcessImage(frame, frame_rule));
      if (i == first) {
        clip.patches = std::move(patches);
      } else {
        clip.patches.patches.insert(clip.patches.patches.end(), patches.patches.begin(), patches.patches.end());
      }
    }
    clip.patches.frames = static_cast<uint32_t>(count);
    clips.push_back(std::move(clip));
  }
  return clips;
}

}  // namespace moonpipe
