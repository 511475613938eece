#include "moonpipe/data/video.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/data/microbatch.h"
#include "moonpipe/data/picture_warp.h"
#include "moonpipe/data/skip.h"

namespace moonpipe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

PictureRule VideoRule() {
  PictureRule rule;
  rule.size_rule = SizeRule::kPatchLimits;
  rule.max_patches = 16384;
  rule.clips = ClipRule{};
  rule.clips->max_patches_each_frame = 4096;
  return rule;
}

RgbImage Frame(int32_t width, int32_t height, uint8_t value) {
  return {width, height, std::vector<uint8_t>(static_cast<size_t>(width) * height * 3, value)};
}

TEST(SampleFrames, KeepsFramesAtTheSampledRateFromFirstToLast) {
  ClipRule rule;
  EXPECT_THAT(SampleFrames(10, 4.0, rule), ElementsAre(0, 2, 4, 7, 9)) << "2.25, 4.5 (to even), 6.75";
  EXPECT_THAT(SampleFrames(5, 1.0, rule), ElementsAre(0, 1, 2, 3, 4)) << "slower than the sampled rate";
  EXPECT_THAT(SampleFrames(5, 4.0, rule), ElementsAre(0, 4)) << "2.5 frames round to 2";
  EXPECT_THAT(SampleFrames(1, 30.0, rule), ElementsAre(0));
  EXPECT_THAT(SampleFrames(3, 30.0, rule), ElementsAre(0)) << "at least one";
  rule.max_frames = 3;
  EXPECT_THAT(SampleFrames(10, 4.0, rule), ElementsAre(0, 4, 9));
}

TEST(SplitIntoClips, LeavesAShorterLastClip) {
  EXPECT_THAT(SplitIntoClips(9, 4), ElementsAre(Pair(0, 4), Pair(4, 4), Pair(8, 1)));
  EXPECT_THAT(SplitIntoClips(4, 4), ElementsAre(Pair(0, 4)));
}

TEST(TimestampText, CutsMillisecondsInEveryMode) {
  EXPECT_EQ(TimestampText(0, TimestampMode::kHoursMillis), "00:00:00.000");
  EXPECT_EQ(TimestampText(3725.5, TimestampMode::kHoursMillis), "01:02:05.500");
  EXPECT_EQ(TimestampText(59.9999, TimestampMode::kHoursMillis), "00:00:59.999");
  EXPECT_EQ(TimestampText(3725.25, TimestampMode::kMinutesMillis), "02:05.250");
  EXPECT_EQ(TimestampText(125.75, TimestampMode::kMinutes), "02:05");
  EXPECT_EQ(TimestampText(86400 + 61, TimestampMode::kHoursMillis), "00:01:01.000");
}

TEST(ClipPrompt, SpellsTheTimeThenTheMedia) {
  EXPECT_EQ(ClipPrompt(2, TimestampMode::kHoursMillis), "00:00:02.000<|media_begin|>video<|media_content|><|media_pad|><|media_end|>");
}

TEST(FramePatchLimit, SharesTheVideosLimitAmongTheFramesOfAClip) {
  ClipRule rule;
  rule.max_patches_each_frame = 4096;
  EXPECT_EQ(FramePatchLimit(rule, 4), 4096);
  rule.max_patches_video = 10;
  EXPECT_EQ(FramePatchLimit(rule, 4), 2) << "2.5 rounds to even";
  EXPECT_EQ(FramePatchLimit(rule, 3), 3);
  rule.max_patches_video = 100000;
  EXPECT_EQ(FramePatchLimit(rule, 4), 4096);
}

TEST(ProcessFrames, MakesClipsOfUpToFourFramesWithTheTimeOfTheFirst) {
  std::vector<RgbImage> frames;
  std::vector<double> seconds;
  for (int i = 0; i < 6; ++i) {
    frames.push_back(Frame(56, 28, static_cast<uint8_t>(10 + i)));
    seconds.push_back(0.5 * i);
  }
  const auto clips = ProcessFrames(frames, seconds, VideoRule());
  ASSERT_TRUE(clips.ok()) << clips.status();
  ASSERT_EQ(clips->size(), 2u);
  EXPECT_EQ((*clips)[0].seconds, 0);
  EXPECT_EQ((*clips)[1].seconds, 2);
  EXPECT_EQ((*clips)[0].patches.frames, 4u);
  EXPECT_EQ((*clips)[1].patches.frames, 2u);
  for (const Clip& clip : *clips) {
    EXPECT_EQ(clip.patches.rows, 2u);
    EXPECT_EQ(clip.patches.columns, 4u);
    EXPECT_EQ(clip.patches.patches.size(), clip.patches.frames * 8u * 588);
  }
  for (size_t frame = 0; frame < 4; ++frame) EXPECT_EQ((*clips)[0].patches.patches[frame * 8 * 588], 10 + frame);
  EXPECT_EQ((*clips)[1].patches.patches[8 * 588], 15);

  // The manifest carries the frames, and the positions do not grow with them.
  const std::vector<int32_t> ids = {1}, labels = {-100};
  Step step;
  AppendMicrobatch({Document{0, &ids, &labels, {&(*clips)[0].patches, &(*clips)[1].patches}}}, 2, -100, step);
  const auto& manifest = step.manifest.microbatches(0);
  EXPECT_EQ(manifest.grids(0).frames(), 4u);
  EXPECT_EQ(manifest.grids(1).frames(), 2u);
  EXPECT_EQ(manifest.feature_rows(), 4u);
  EXPECT_EQ(step.microbatches[0].patches.size(), 6u * 8 * 588);
}

TEST(ProcessFrames, ShrinksFramesToTheirShare) {
  PictureRule rule = VideoRule();
  rule.clips->max_patches_video = 64;
  const auto clips = ProcessFrames(std::vector<RgbImage>(5, Frame(112, 112, 9)), {0, 1, 2, 3, 4}, rule);
  ASSERT_TRUE(clips.ok());
  EXPECT_EQ((*clips)[0].patches.rows, 4u) << "16 patches each for four frames";
  EXPECT_EQ((*clips)[1].patches.rows, 8u) << "64 patches for one frame";
}

TEST(ProcessFrames, RefusesFramesOfSeveralSizesAndModelsWithoutVideo) {
  const absl::Status sizes = ProcessFrames({Frame(28, 28, 1), Frame(28, 56, 1)}, {0, 1}, VideoRule()).status();
  EXPECT_EQ(SkipReason(sizes), "bad_picture");
  EXPECT_THAT(sizes.message(), HasSubstr("frame 1 has 28x56 pixels, frame 0 has 28x28"));
  PictureRule none = VideoRule();
  none.clips.reset();
  EXPECT_THAT(ProcessFrames({Frame(28, 28, 1)}, {0}, none).status().message(), HasSubstr("no video"));
  EXPECT_THAT(ProcessFrames({Frame(28, 28, 1)}, {0, 1}, VideoRule()).status().message(), HasSubstr("1 frames with 2 times"));
}

TEST(WarpPicture, MovesEveryFrameOfAClipAndBlocksAsRasters) {
  PictureRule rule = VideoRule();
  RgbImage image = Frame(56, 56, 0);
  for (size_t i = 0; i < image.pixels.size(); ++i) image.pixels[i] = static_cast<uint8_t>(i * 31 >> 3);
  for (const PatchOrder order : {PatchOrder::kRaster, PatchOrder::kBlock}) {
    rule.patch_order = order;
    const auto clip = ProcessFrames({image, image}, {0, 1}, rule);
    ASSERT_TRUE(clip.ok());
    RgbImage moved = Frame(56, 56, 0);
    for (size_t y = 0; y < 51; ++y) {
      for (size_t x = 3; x < 56; ++x) {
        for (size_t c = 0; c < 3; ++c) moved.pixels[(y * 56 + x) * 3 + c] = image.pixels[((y + 5) * 56 + x - 3) * 3 + c];
      }
    }
    const PicturePatches shifted = WarpPicture((*clip)[0].patches, {.right = 3, .down = -5, .source = {65536, 0, 0, 65536}}, rule);
    EXPECT_EQ(shifted.frames, 2u);
    EXPECT_EQ(shifted.patches, (*ProcessFrames({moved, moved}, {0, 1}, rule))[0].patches.patches);
  }
}

}  // namespace
}  // namespace moonpipe
