#include "services/coordinator/checkpoint_manifest.h"

#include <google/protobuf/util/json_util.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using nlohmann::json;

constexpr int kFormat = 1;

}  // namespace

uint64_t CheckpointManifest::total_bytes() const {
  uint64_t bytes = 0;
  for (const CheckpointFile& file : files) bytes += file.size_bytes;
  return bytes;
}

std::string CheckpointManifestToJson(const CheckpointManifest& manifest) {
  nlohmann::ordered_json text;
  text["format"] = kFormat;
  text["step"] = manifest.step;
  text["seed"] = manifest.seed;
  text["cursor"] = {
      {"epoch", manifest.cursor.epoch()}, {"window", manifest.cursor.window()}, {"pack", manifest.cursor.pack()}};
  text["compute_threads"] = manifest.compute_threads;
  text["cpu_model"] = manifest.cpu_model;
  text["torch_version"] = manifest.torch_version;
  text["ready_time"] = absl::FormatTime(absl::RFC3339_full, manifest.ready_time, absl::UTCTimeZone());
  std::string spec;
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  const auto printed = google::protobuf::util::MessageToJsonString(manifest.spec, &spec, options);
  text["spec"] = nlohmann::ordered_json::parse(printed.ok() ? spec : "{}");
  text["files"] = nlohmann::ordered_json::array();
  for (const CheckpointFile& file : manifest.files) {
    text["files"].push_back({{"name", file.name}, {"size_bytes", file.size_bytes}, {"sha256", file.sha256}});
  }
  return text.dump(2) + "\n";
}

absl::StatusOr<CheckpointManifest> ParseCheckpointManifest(absl::string_view bytes) {
  CheckpointManifest manifest;
  try {
    const json text = json::parse(bytes.begin(), bytes.end());
    if (text.at("format").get<int>() != kFormat) {
      return absl::InvalidArgumentError(absl::StrCat("format ", text.at("format").dump(), ", ", kFormat, " is known"));
    }
    manifest.step = text.at("step").get<uint64_t>();
    manifest.seed = text.at("seed").get<uint64_t>();
    manifest.cursor.set_epoch(text.at("cursor").at("epoch").get<uint64_t>());
    manifest.cursor.set_window(text.at("cursor").at("window").get<uint64_t>());
    manifest.cursor.set_pack(text.at("cursor").at("pack").get<uint64_t>());
    manifest.compute_threads = text.at("compute_threads").get<uint32_t>();
    manifest.cpu_model = text.at("cpu_model").get<std::string>();
    manifest.torch_version = text.at("torch_version").get<std::string>();
    std::string error;
    if (!absl::ParseTime(absl::RFC3339_full, text.at("ready_time").get<std::string>(), &manifest.ready_time, &error)) {
      return absl::InvalidArgumentError(absl::StrCat("ready_time: ", error));
    }
    // A field that a newer program wrote into the spec does not make the weights unreadable.
    google::protobuf::util::JsonParseOptions options;
    options.ignore_unknown_fields = true;
    const auto parsed = google::protobuf::util::JsonStringToMessage(text.at("spec").dump(), &manifest.spec, options);
    if (!parsed.ok()) return absl::InvalidArgumentError(absl::StrCat("spec: ", parsed.ToString()));
    for (const json& file : text.at("files")) {
      manifest.files.push_back({file.at("name").get<std::string>(), file.at("size_bytes").get<uint64_t>(),
                                file.at("sha256").get<std::string>()});
    }
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return manifest;
}

std::vector<std::string> DifferencesThatChangeBits(const CheckpointManifest& before, uint32_t compute_threads,
                                                   const std::string& cpu_model, const std::string& torch_version) {
  std::vector<std::string> differences;
  const auto add = [&](absl::string_view what, const std::string& then, const std::string& now) {
    if (then != now) differences.push_back(absl::StrCat(what, " was ", then, ", is ", now));
  };
  add("compute_threads", absl::StrCat(before.compute_threads), absl::StrCat(compute_threads));
  add("the CPU", before.cpu_model, cpu_model);
  add("the version of torch", before.torch_version, torch_version);
  return differences;
}

}  // namespace moonpipe
