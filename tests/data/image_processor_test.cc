#include "moonpipe/data/image_processor.h"

#include <png.h>

#include <array>
#include <cmath>
#include <fstream>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "moonpipe/data/png_decoder.h"
#include "moonpipe/data/resize.h"
#include "moonpipe/data/skip.h"
#include "moonpipe/spec/safetensors.h"
#include "tests/data/testing_files.h"

namespace moonpipe {
namespace {

using testing::HasSubstr;

PictureRule KimiVlRule() {
  PictureRule rule;
  rule.max_patches = 4096;
  return rule;
}

// The bytes of the golden pictures before resizing, as make_picture_golden.py computes them.
uint8_t Noise(uint32_t i) { return static_cast<uint8_t>((i * 2654435761u + (i >> 3) * 40503u) >> 13); }

std::vector<uint8_t> Bytes(const std::string& text) { return {text.begin(), text.end()}; }

TEST(DecodePng, GivesPillowsRgbForEveryKindOfPng) {
  const nlohmann::json golden = ReadGolden("pictures.json");
  ASSERT_GE(golden["png"].size(), 30u);
  for (const nlohmann::json& entry : golden["png"]) {
    const auto image = DecodePng(FromBase64(entry["png"]));
    ASSERT_TRUE(image.ok()) << entry["name"] << image.status();
    EXPECT_EQ(image->width, golden["width"]);
    EXPECT_EQ(image->height, golden["height"]);
    EXPECT_EQ(image->pixels, Bytes(FromBase64(entry["rgb"]))) << entry["name"];
  }
}

TEST(DecodePng, RefusesEveryCutAndAnyFlippedPixelByte) {
  const std::string png = PngOf(28, 28, 10, 200, 30);
  for (size_t size = 0; size < png.size(); ++size) EXPECT_FALSE(DecodePng(png.substr(0, size)).ok()) << size;
  for (size_t i = png.find("IDAT"); i < png.find("IEND") - 4; ++i) {
    std::string flipped = png;
    flipped[i] = static_cast<char>(flipped[i] ^ 0x10);
    EXPECT_FALSE(DecodePng(flipped).ok()) << i;
  }
}

TEST(DecodePng, RefusesMorePixelsThanTheLimitBeforeDecoding) {
  EXPECT_TRUE(DecodePng(PngOf(28, 28, 0, 0, 0), 784).ok());
  EXPECT_THAT(DecodePng(PngOf(28, 28, 0, 0, 0), 783).status().message(), HasSubstr("28x28 pixels; the limit is 783"));
  std::string bomb = PngOf(28, 28, 0, 0, 0);
  // The header claims 1,000,000 x 1,000,000; its checksum is computed by libpng's rule over the changed bytes.
  const std::string header = std::string("IHDR\x00\x0f\x42\x40\x00\x0f\x42\x40\x08\x02\x00\x00\x00", 17);
  uint32_t crc = 0xffffffffu;
  for (const char c : header) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  crc = ~crc;
  bomb.replace(12, 17, header);
  for (int i = 0; i < 4; ++i) bomb[29 + i] = static_cast<char>(crc >> (24 - 8 * i));
  EXPECT_THAT(DecodePng(bomb).status().message(), HasSubstr("1000000x1000000"));
}

TEST(ResizeBicubic, GivesPillowsBytes) {
  const nlohmann::json golden = ReadGolden("pictures.json");
  ASSERT_EQ(golden["resize"].size(), 8u);
  for (const nlohmann::json& entry : golden["resize"]) {
    RgbImage image{entry["from"][0], entry["from"][1], {}};
    for (uint32_t i = 0; i < static_cast<uint32_t>(image.width * image.height * 3); ++i) {
      image.pixels.push_back(i / 48 % 3 != 0 ? Noise(i) : static_cast<uint8_t>(255 * (i % 2)));
    }
    const RgbImage resized = ResizeBicubic(image, entry["to"][0], entry["to"][1]);
    EXPECT_EQ(resized.width, entry["to"][0]);
    EXPECT_EQ(resized.height, entry["to"][1]);
    EXPECT_EQ(resized.pixels, Bytes(FromBase64(entry["rgb"]))) << entry["from"] << " to " << entry["to"];
  }
}

TEST(ResizeBicubic, GivesPillowsBytesOnPhotographs) {
  const nlohmann::json golden = ReadGolden("photos.json");
  ASSERT_EQ(golden.size(), 3u);
  for (const nlohmann::json& photo : golden) {
    const auto image = DecodePng(FromBase64(photo["png"]));
    ASSERT_TRUE(image.ok()) << image.status();
    for (const nlohmann::json& entry : photo["resized"]) {
      const RgbImage resized = ResizeBicubic(*image, entry["to"][0], entry["to"][1]);
      EXPECT_EQ(Sha256Hex(absl::string_view(reinterpret_cast<const char*>(resized.pixels.data()), resized.pixels.size())), entry["sha256"])
          << photo["name"] << " to " << entry["to"];
      EXPECT_EQ(ResizeBicubic(*image, entry["to"][0], entry["to"][1], /*plain=*/true).pixels, resized.pixels);
    }
  }
}

TEST(ProcessPicture, ShrinksPadsWithZerosAndReportsTheGrid) {
  const auto picture = ProcessPicture(PngOf(1000, 1000, 255, 255, 255), KimiVlRule());
  ASSERT_TRUE(picture.ok()) << picture.status();
  EXPECT_EQ(picture->rows, 66u);
  EXPECT_EQ(picture->columns, 66u);
  ASSERT_EQ(picture->patches.size(), 66u * 66 * 588);
  // 901 pixels: 64 whole patches, 5 pixels of the next, and one patch of padding.
  const auto at = [&](size_t row, size_t column, size_t y, size_t x) { return picture->patches[(row * 66 + column) * 588 + y * 14 + x]; };
  EXPECT_EQ(at(0, 63, 0, 13), 255);
  EXPECT_EQ(at(0, 64, 0, 4), 255);
  EXPECT_EQ(at(0, 64, 0, 5), 0);
  EXPECT_EQ(at(64, 0, 4, 0), 255);
  EXPECT_EQ(at(64, 0, 5, 0), 0);
  EXPECT_EQ(at(65, 65, 13, 13), 0);
}

TEST(ProcessPicture, CutsPatchesInRasterOrderWithChannelsFirst) {
  RgbImage image{56, 28, {}};
  for (int y = 0; y < 28; ++y) {
    for (int x = 0; x < 56; ++x) image.pixels.insert(image.pixels.end(), {uint8_t(x), uint8_t(y), uint8_t(x + 4 * y)});
  }
  const auto picture = ProcessPicture(PngBytes(image), KimiVlRule());
  ASSERT_TRUE(picture.ok()) << picture.status();
  ASSERT_EQ(picture->patches.size(), 8u * 588);
  for (int y = 0; y < 28; ++y) {
    for (int x = 0; x < 56; ++x) {
      const uint8_t* patch = picture->patches.data() + (y / 14 * 4 + x / 14) * 588 + y % 14 * 14 + x % 14;
      ASSERT_EQ(patch[0], x);
      ASSERT_EQ(patch[196], y);
      ASSERT_EQ(patch[392], uint8_t(x + 4 * y));
    }
  }
}

// A 28x28 PNG in one of libpng's formats: every pixel has the given bytes (an index, where there is a palette).
std::string PngOfFormat(png_uint_32 format, const std::vector<uint8_t>& pixel, const std::vector<uint8_t>& palette = {}) {
  png_image out{};
  out.version = PNG_IMAGE_VERSION;
  out.width = out.height = 28;
  out.format = format;
  out.colormap_entries = static_cast<png_uint_32>(palette.size() / 3);
  std::vector<uint8_t> pixels;
  for (int i = 0; i < 28 * 28; ++i) pixels.insert(pixels.end(), pixel.begin(), pixel.end());
  std::string bytes(1 << 16, '\0');
  png_alloc_size_t size = bytes.size();
  EXPECT_TRUE(png_image_write_to_memory(&out, bytes.data(), &size, 0, pixels.data(), 0, palette.data())) << out.message;
  bytes.resize(size);
  return bytes;
}

TEST(ProcessPicture, GivesOneChannelPaletteAndTransparentPicturesTheirNormalisedValues) {
  const std::vector<uint8_t> palette = {9, 9, 9, 255, 0, 0};
  for (const auto& [name, png, expected] : std::vector<std::tuple<std::string, std::string, std::array<double, 3>>>{
           {"grey", PngOfFormat(PNG_FORMAT_GRAY, {128}), {0.003922, 0.003922, 0.003922}},
           {"grey with alpha", PngOfFormat(PNG_FORMAT_GA, {128, 7}), {0.003922, 0.003922, 0.003922}},
           {"palette", PngOfFormat(PNG_FORMAT_RGB_COLORMAP, {1}, palette), {1, -1, -1}},
           {"its RGB twin", PngOf(28, 28, 255, 0, 0), {1, -1, -1}},
           {"transparent", PngOfFormat(PNG_FORMAT_RGBA, {255, 0, 0, 0}), {1, -1, -1}},
           {"half transparent", PngOfFormat(PNG_FORMAT_RGBA, {255, 0, 0, 128}), {1, -1, -1}}}) {
    const auto picture = ProcessPicture(png, KimiVlRule());
    ASSERT_TRUE(picture.ok()) << name << picture.status();
    EXPECT_EQ(MediaPositions(picture->rows, picture->columns, 2), 1u);
    ASSERT_EQ(picture->patches.size(), 4u * 588);
    for (size_t i = 0; i < picture->patches.size(); ++i) {
      ASSERT_NEAR((picture->patches[i] / 255.0 - 0.5) / 0.5, expected[i / 196 % 3], 1e-6) << name;
    }
  }
}

TEST(ProcessPicture, SkipsWhatIsNoWholePngWithAReason) {
  const std::string png = PngOf(28, 28, 1, 2, 3);
  for (const auto& [bytes, detail] : std::vector<std::pair<std::string, std::string>>{{"", "empty"},
                                                                                       {"hello", "unknown format"},
                                                                                       {"\xff\xd8\xff\xe0 and so on", "JPEG"},
                                                                                       {png.substr(0, png.size() / 2), "damaged PNG"}}) {
    const absl::Status status = ProcessPicture(bytes, KimiVlRule()).status();
    EXPECT_EQ(SkipReason(status), "bad_picture") << status;
    EXPECT_THAT(status.message(), HasSubstr(detail));
  }
}

TEST(ProcessPicture, LaysTransparentPicturesOverTheBackgroundThatTheRuleNames) {
  const std::string half = PngOfFormat(PNG_FORMAT_RGBA, {255, 0, 51, 128});
  const std::string clear = PngOfFormat(PNG_FORMAT_RGBA, {255, 0, 51, 0});
  PictureRule rule = KimiVlRule();
  const auto first_pixel = [&](const std::string& png) {
    const auto picture = ProcessPicture(png, rule);
    EXPECT_TRUE(picture.ok()) << picture.status();
    return std::array<int, 3>{picture->patches[0], picture->patches[196], picture->patches[392]};
  };
  using Pattern = PictureBackground::Pattern;
  rule.background = PictureBackground{.pattern = Pattern::kWhite};
  EXPECT_EQ(first_pixel(clear), (std::array<int, 3>{255, 255, 255}));
  EXPECT_EQ(first_pixel(half), (std::array<int, 3>{255, 126, 152})) << "numpy: 126.99999 and 152.59999, cut";
  rule.background->pattern = Pattern::kBlack;
  EXPECT_EQ(first_pixel(half), (std::array<int, 3>{128, 0, 25}));
  rule.background->pattern = Pattern::kGrey;
  EXPECT_EQ(first_pixel(clear), (std::array<int, 3>{128, 128, 128}));
  EXPECT_EQ(first_pixel(PngOf(28, 28, 1, 2, 3)), (std::array<int, 3>{1, 2, 3})) << "no transparency";
  EXPECT_EQ(first_pixel(PngOfFormat(PNG_FORMAT_GA, {10, 0})), (std::array<int, 3>{128, 128, 128}));

  rule.background->pattern = Pattern::kChessboard;
  auto board = ProcessPicture(clear, rule);
  ASSERT_TRUE(board.ok());
  const auto at = [&](size_t x, size_t y) { return board->patches[(y / 14 * 2 + x / 14) * 588 + y % 14 * 14 + x % 14]; };
  EXPECT_EQ(at(0, 0), 255);
  EXPECT_EQ(at(15, 15), 255);
  EXPECT_EQ(at(16, 15), 200);
  EXPECT_EQ(at(15, 16), 200);
  EXPECT_EQ(at(16, 16), 255);
  rule.background->white_first = false;
  board = ProcessPicture(clear, rule);
  EXPECT_EQ(at(0, 0), 200);
}

TEST(DecodePng, GivesTheOpacityOfPalettesAndOfOneTransparentColour) {
  const nlohmann::json golden = ReadGolden("pictures.json");
  size_t transparent = 0;
  for (const nlohmann::json& entry : golden["png"]) {
    std::vector<uint8_t> alpha;
    const auto image = DecodePng(FromBase64(entry["png"]), kMostPixels, &alpha);
    ASSERT_TRUE(image.ok());
    EXPECT_EQ(image->pixels, Bytes(FromBase64(entry["rgb"]))) << "opacity changes no colour: " << entry["name"];
    const std::string name = entry["name"];
    const bool expected = name.find("alpha") != std::string::npos || name.find("rgba") == 0 || name.find("transparent") != std::string::npos;
    EXPECT_EQ(alpha.size(), expected ? image->pixels.size() / 3 : 0) << name;
    transparent += expected;
  }
  EXPECT_GE(transparent, 8u);
}

TEST(CutPatches, BlocksKeepThePatchesOfAPositionTogether) {
  EXPECT_EQ(PatchSequence(PatchOrder::kBlock, 4, 4, 2, 2), (std::vector<int64_t>{0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15}));
  EXPECT_EQ(PatchSequence(PatchOrder::kBlock, 2, 4, 2, 2), (std::vector<int64_t>{0, 1, 4, 5, 2, 3, 6, 7}));
  EXPECT_EQ(PatchSequence(PatchOrder::kRaster, 2, 2, 2, 2), (std::vector<int64_t>{0, 1, 2, 3}));
  RgbImage image{56, 56, {}};
  for (int y = 0; y < 56; ++y) {
    for (int x = 0; x < 56; ++x) image.pixels.insert(image.pixels.end(), 3, static_cast<uint8_t>(y / 14 * 4 + x / 14));
  }
  PictureRule rule = KimiVlRule();
  rule.patch_order = PatchOrder::kBlock;
  const auto picture = ProcessImage(image, rule);
  ASSERT_TRUE(picture.ok());
  std::vector<int> order;
  for (size_t i = 0; i < 16; ++i) order.push_back(picture->patches[i * 588 + 587]);
  EXPECT_EQ(order, (std::vector<int>{0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15}));
}

TEST(ProcessImage, CropsAroundTheMiddleWhereTheRuleDoesNotPad) {
  RgbImage image{61, 31, {}};
  for (int y = 0; y < 31; ++y) {
    for (int x = 0; x < 61; ++x) image.pixels.insert(image.pixels.end(), {uint8_t(x), uint8_t(y), 0});
  }
  PictureRule rule = KimiVlRule();
  rule.pad = false;
  const auto picture = ProcessImage(image, rule);
  ASSERT_TRUE(picture.ok()) << picture.status();
  EXPECT_EQ(picture->rows, 2u);
  EXPECT_EQ(picture->columns, 4u);
  EXPECT_EQ(picture->patches[0], 2) << "5 pixels too wide: 2.5 rounds to 2";
  EXPECT_EQ(picture->patches[196], 2) << "3 pixels too high: 1.5 rounds to 2";
  EXPECT_EQ(SkipReason(ProcessImage({27, 28, std::vector<uint8_t>(27 * 28 * 3)}, rule).status()), "bad_picture");
}

TEST(ProcessImage, EqualsTheRecordedProcessorOfK25) {
  const std::string folder = TEST_DATA_DIR "/fixtures/preprocess_k2_5";
  const auto file = SafetensorsFile::Open(folder + "/io.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  std::ifstream meta_file(folder + "/meta.json");
  const nlohmann::json meta = nlohmann::json::parse(meta_file);
  ASSERT_EQ(meta["cases"].size(), 5u);
  for (const auto& [name, entry] : meta["cases"].items()) {
    PictureRule rule;
    rule.size_rule = SizeRule::kPatchLimits;
    rule.max_patches = entry["arguments"].value("max_patches", 16384);
    if (entry["arguments"].contains("size")) rule.max_side_patches = entry["arguments"]["size"]["max_height"];
    const auto read = [&](const std::string& tensor) { return file->Find(name + tensor).value(); };
    const StoredTensor& in = *read("/in/image");
    const auto height = static_cast<int32_t>(in.shape[1]), width = static_cast<int32_t>(in.shape[2]);
    const size_t pixels = static_cast<size_t>(height) * width;
    RgbImage image{width, height, std::vector<uint8_t>(pixels * 3)};
    const auto* bytes = static_cast<const uint8_t*>(in.data);
    for (size_t i = 0; i < pixels * 3; ++i) image.pixels[i] = bytes[i % 3 * pixels + i / 3];

    const auto size = SizePicture(width, height, rule);
    ASSERT_TRUE(size.ok()) << name << size.status();
    const auto* resized_hw = static_cast<const int64_t*>(read("/out/resized_hw")->data);
    const auto* padded_hw = static_cast<const int64_t*>(read("/out/padded_hw")->data);
    EXPECT_EQ(size->height, resized_hw[0]) << name;
    EXPECT_EQ(size->width, resized_hw[1]) << name;
    EXPECT_EQ(size->padded_height, padded_hw[0]) << name;
    EXPECT_EQ(size->padded_width, padded_hw[1]) << name;
    const auto* grid = static_cast<const int64_t*>(read("/out/grid_thws")->data);
    EXPECT_EQ(grid[0], 1);
    EXPECT_EQ(size->rows, grid[1]) << name;
    EXPECT_EQ(size->columns, grid[2]) << name;

    const RgbImage resized = ResizeBicubic(image, size->width, size->height);
    const StoredTensor& pil = *read("/out/pil_resized");
    const auto* pil_bytes = static_cast<const uint8_t*>(pil.data);
    const size_t resized_pixels = resized.pixels.size() / 3;
    ASSERT_EQ(pil.num_elements(), resized.pixels.size());
    for (size_t i = 0; i < resized.pixels.size(); ++i) ASSERT_EQ(resized.pixels[i], pil_bytes[i % 3 * resized_pixels + i / 3]) << name << i;

    const auto picture = ProcessImage(image, rule);
    ASSERT_TRUE(picture.ok()) << name;
    const StoredTensor& out = *read("/out/pixel_values");
    ASSERT_EQ(out.num_elements(), picture->patches.size()) << name;
    const auto* values = static_cast<const float*>(out.data);
    // The recorded processor resizes with torchvision, which may be one level off.
    const double tolerance = entry["max_levels_from_pil"].get<double>() * 2 / 255 + 1e-6;
    for (size_t i = 0; i < picture->patches.size(); ++i) {
      ASSERT_NEAR((picture->patches[i] / 255.0 - 0.5) / 0.5, values[i], tolerance) << name << " " << i;
    }
  }
}

}  // namespace
}  // namespace moonpipe
