#include "tests/data/testing_files.h"

#include <png.h>

#include <cstdio>
#include <filesystem>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"

namespace moonpipe {

std::string MakeFolder(const std::string& name) {
  const std::string path = absl::StrCat(testing::TempDir(), "/data_test_", name);
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

std::string TarBytes(const TarMembers& members) {
  std::string tar;
  for (const auto& [name, bytes] : members) {
    std::string header(512, '\0');
    header.replace(0, name.size(), name);
    char field[16];
    std::snprintf(field, sizeof(field), "%011zo", bytes.size());
    header.replace(124, 11, field);
    header.replace(100, 7, "0000644");
    header[156] = '0';
    header.replace(257, 5, "ustar");
    header.replace(263, 2, "00");
    header.replace(148, 8, 8, ' ');
    unsigned sum = 0;
    for (const char c : header) sum += static_cast<unsigned char>(c);
    std::snprintf(field, sizeof(field), "%06o", sum);
    header.replace(148, 7, std::string(field) + '\0');
    tar += header + bytes + std::string((512 - bytes.size() % 512) % 512, '\0');
  }
  return tar + std::string(1024, '\0');
}

std::string WriteTar(const std::string& path, const TarMembers& members) {
  EXPECT_TRUE(WriteFileAtomically(path, TarBytes(members)).ok());
  return path;
}

std::string PngBytes(const RgbImage& image) {
  png_image out{};
  out.version = PNG_IMAGE_VERSION;
  out.width = static_cast<png_uint_32>(image.width);
  out.height = static_cast<png_uint_32>(image.height);
  out.format = PNG_FORMAT_RGB;
  png_alloc_size_t size = 0;
  EXPECT_TRUE(png_image_write_to_memory(&out, nullptr, &size, 0, image.pixels.data(), 0, nullptr));
  std::string bytes(size, '\0');
  EXPECT_TRUE(png_image_write_to_memory(&out, bytes.data(), &size, 0, image.pixels.data(), 0, nullptr));
  bytes.resize(size);
  return bytes;
}

std::string PngOf(int32_t width, int32_t height, uint8_t red, uint8_t green, uint8_t blue) {
  RgbImage image{width, height, {}};
  for (int32_t i = 0; i < width * height; ++i) image.pixels.insert(image.pixels.end(), {red, green, blue});
  return PngBytes(image);
}

std::string RecordJson(const std::string& question, const std::string& answer, const std::vector<std::string>& images) {
  return nlohmann::json{{"messages", {{{"role", "user"}, {"content", question}}, {{"role", "assistant"}, {"content", answer}}}},
                        {"images", images}}
      .dump();
}

std::string DigitsFolder() { return absl::StrCat(SOURCE_DIR, "/examples/digits"); }

StepSourceOptions DigitsOptions(const std::vector<std::string>& files) {
  StepSourceOptions options;
  options.files = files;
  options.tokenizer_folder = absl::StrCat(DigitsFolder(), "/tokenizer");
  options.pictures.max_patches = 4096;
  options.vocab_size = 448;
  options.media_placeholder_token_id = 421;
  options.microbatches = 4;
  options.microbatch_tokens = 256;
  return options;
}

std::unique_ptr<Tokenizer> DigitsTokenizer() {
  auto tokenizer = Tokenizer::Load(absl::StrCat(DigitsFolder(), "/tokenizer"));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

nlohmann::json ReadGolden(const std::string& name) {
  const auto text = ReadFile(absl::StrCat(TEST_DATA_DIR, "/data/golden/", name));
  EXPECT_TRUE(text.ok()) << text.status();
  return nlohmann::json::parse(*text);
}

std::string FromBase64(const nlohmann::json& text) {
  std::string bytes;
  EXPECT_TRUE(absl::Base64Unescape(text.get<std::string>(), &bytes));
  return bytes;
}

}  // namespace moonpipe
