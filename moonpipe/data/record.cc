#include "moonpipe/data/record.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/skip.h"

namespace moonpipe {
namespace {

using nlohmann::json;
constexpr absl::string_view kTag = "<image>";

absl::Status Bad(absl::string_view detail) { return SkipError(kBadRecord, detail); }

// Puts turns together and hands out the pictures of "images" in order.
class RecordBuilder {
 public:
  explicit RecordBuilder(std::vector<std::string> images) : images_(std::move(images)) {}

  absl::Status AddTurn(const json& message) {
    if (!message.is_object()) return Bad("a message is not an object");
    const auto role = message.find("role");
    const auto content = message.find("content");
    if (role == message.end() || !role->is_string()) return Bad("a message has no string \"role\"");
    if (content == message.end()) return Bad("a message has no \"content\"");
    record_.turns.push_back({role->get<std::string>(), {}});
    if (content->is_string()) {
      AddTagged(content->get_ref<const std::string&>());
      return absl::OkStatus();
    }
    if (!content->is_array()) return Bad("a \"content\" is neither a string nor a list of parts");
    for (const json& part : *content) MOONPIPE_RETURN_IF_ERROR(AddPart(part));
    return absl::OkStatus();
  }

  absl::StatusOr<Record> Finish() {
    if (record_.turns.empty()) return Bad("\"messages\" is empty");
    if (places_ != images_.size()) {
      return Bad(absl::StrCat("the messages have places for ", places_, " of the pictures in \"images\", which names ", images_.size()));
    }
    return std::move(record_);
  }

 private:
  void AddText(absl::string_view text) {
    if (text.empty()) return;
    std::vector<ContentPart>& parts = record_.turns.back().parts;
    if (parts.empty() || parts.back().is_picture) parts.push_back({});
    absl::StrAppend(&parts.back().text, text);
  }

  void AddPicture(std::string name) {
    record_.turns.back().parts.push_back({true, "", record_.pictures.size()});
    record_.pictures.push_back(std::move(name));
  }

  void AddNextImage() {
    // A place without a picture is counted; Finish refuses the record.
    if (places_ < images_.size()) AddPicture(images_[places_]);
    ++places_;
  }

  void AddTagged(absl::string_view text) {
    for (size_t tag = text.find(kTag); tag != absl::string_view::npos; tag = text.find(kTag)) {
      AddText(text.substr(0, tag));
      AddNextImage();
      text.remove_prefix(tag + kTag.size());
    }
    AddText(text);
  }

  absl::Status AddPart(const json& part) {
    const auto type = part.is_object() ? part.find("type") : part.end();
    if (!part.is_object() || type == part.end() || !type->is_string()) return Bad("a content part has no string \"type\"");
    const auto& kind = type->get_ref<const std::string&>();
    if (kind == "text") {
      const auto text = part.find("text");
      if (text == part.end() || !text->is_string()) return Bad("a text part has no string \"text\"");
      AddText(text->get_ref<const std::string&>());
      return absl::OkStatus();
    }
    if (kind != "image" && kind != "image_url") return Bad(absl::StrCat("content parts of type \"", kind, "\" are not known"));
    auto picture = part.find(kind);
    if (picture == part.end() && kind == "image") {
      AddNextImage();
      return absl::OkStatus();
    }
    const json* name = picture == part.end() ? nullptr : &*picture;
    if (name != nullptr && name->is_object()) name = name->contains("url") ? &(*name)["url"] : nullptr;
    if (name == nullptr || !name->is_string()) return Bad(absl::StrCat("a content part of type \"", kind, "\" names no picture"));
    AddPicture(name->get<std::string>());
    return absl::OkStatus();
  }

  std::vector<std::string> images_;
  size_t places_ = 0;
  Record record_;
};

}  // namespace

absl::StatusOr<Record> ParseRecord(absl::string_view text) {
  json root;
  try {
    root = json::parse(text.begin(), text.end());
  } catch (const json::exception& error) {
    return SkipError(kBadJson, error.what());
  }
  if (!root.is_object()) return Bad("the record is not an object");
  std::vector<std::string> images;
  if (const auto list = root.find("images"); list != root.end() && !list->is_null()) {
    if (!list->is_array()) return Bad("\"images\" is not a list");
    for (const json& name : *list) {
      if (!name.is_string()) return Bad("an entry of \"images\" is not a string");
      images.push_back(name.get<std::string>());
    }
  }
  const auto messages = root.find("messages");
  if (messages == root.end() || !messages->is_array()) return Bad("no list \"messages\"");
  RecordBuilder builder(std::move(images));
  for (const json& message : *messages) MOONPIPE_RETURN_IF_ERROR(builder.AddTurn(message));
  return builder.Finish();
}

}  // namespace moonpipe
