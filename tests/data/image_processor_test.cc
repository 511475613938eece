#include "moonpipe/data/image_processor.h"

#include <png.h>

#include <array>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/data/png_decoder.h"
#include "moonpipe/data/resize.h"
#include "moonpipe/data/skip.h"
#include "tests/data/testing_files.h"

namespace moonpipe {
namespace {

using testing::HasSubstr;

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

TEST(SizePicture, AppliesThePatchLimitBeforePadding) {
  // width, height, limit, resized, padded, grid, positions; all square.
  for (const auto& [side, limit, resized, padded, grid, positions] :
       std::vector<std::tuple<int, int, int, int, uint32_t, uint32_t>>{
           {1000, 4096, 901, 924, 66, 1089}, {4096, 16384, 1795, 1820, 130, 4225}, {1792, 4096, 896, 896, 64, 1024}}) {
    const auto size = SizePicture(side, side, {14, 2, limit});
    ASSERT_TRUE(size.ok()) << size.status();
    EXPECT_EQ(size->width, resized);
    EXPECT_EQ(size->height, resized);
    EXPECT_EQ(size->padded_width, padded);
    EXPECT_EQ(size->padded_height, padded);
    EXPECT_EQ(size->rows, grid);
    EXPECT_EQ(size->columns, grid);
    EXPECT_EQ(MediaPositions(size->rows, size->columns, 2), positions);
  }
}

TEST(SizePicture, NeverEnlargesAndKeepsRowsAndColumnsApart) {
  const auto size = SizePicture(57, 13, {});
  ASSERT_TRUE(size.ok());
  EXPECT_EQ(size->width, 57);
  EXPECT_EQ(size->height, 13);
  EXPECT_EQ(size->rows, 2u);
  EXPECT_EQ(size->columns, 6u);
}

TEST(SizePicture, RefusesASideOf512Patches) {
  EXPECT_TRUE(SizePicture(7140, 14, {}).ok()) << "510 patches";
  const absl::Status refused = SizePicture(7141, 14, {}).status();
  EXPECT_EQ(SkipReason(refused), "bad_picture");
  EXPECT_THAT(refused.message(), HasSubstr("2x512"));
}

TEST(ProcessPicture, ShrinksPadsWithZerosAndReportsTheGrid) {
  const auto picture = ProcessPicture(PngOf(1000, 1000, 255, 255, 255), {});
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
  const auto picture = ProcessPicture(PngBytes(image), {});
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
    const auto picture = ProcessPicture(png, {});
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
    const absl::Status status = ProcessPicture(bytes, {}).status();
    EXPECT_EQ(SkipReason(status), "bad_picture") << status;
    EXPECT_THAT(status.message(), HasSubstr(detail));
  }
}

}  // namespace
}  // namespace moonpipe
