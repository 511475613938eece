// Small files that the tests of this folder make: tar shards, PNG pictures, tokenizer folders.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "moonpipe/data/image.h"
#include "moonpipe/data/step_source.h"
#include "moonpipe/data/tokenizer.h"

namespace moonpipe {

// A fresh folder below testing::TempDir().
std::string MakeFolder(const std::string& name);

using TarMembers = std::vector<std::pair<std::string, std::string>>;  // name, bytes
std::string TarBytes(const TarMembers& members);
std::string WriteTar(const std::string& path, const TarMembers& members);  // returns `path`

std::string PngBytes(const RgbImage& image);
// One colour all over.
std::string PngOf(int32_t width, int32_t height, uint8_t red, uint8_t green, uint8_t blue);

// A record with one user turn and one assistant turn.
std::string RecordJson(const std::string& question, const std::string& answer, const std::vector<std::string>& images = {});

// The quick start's data, and the options that fit it.
std::string DigitsFolder();
StepSourceOptions DigitsOptions(const std::vector<std::string>& files);
std::unique_ptr<Tokenizer> DigitsTokenizer();

nlohmann::json ReadGolden(const std::string& name);
std::string FromBase64(const nlohmann::json& text);

}  // namespace moonpipe
