// The text form of actions and schedules.
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/pipeline/schedule.h"

namespace moonpipe {
namespace {

constexpr std::pair<ActionType, absl::string_view> kCodes[] = {
    {ActionType::kForward, "F"},
    {ActionType::kBackward, "B"},
    {ActionType::kSendActivation, "SA"},
    {ActionType::kReceiveActivation, "RA"},
    {ActionType::kSendGradient, "SG"},
    {ActionType::kReceiveGradient, "RG"},
    {ActionType::kSendFeatures, "SF"},
    {ActionType::kReceiveFeatures, "RF"},
    {ActionType::kSendFeatureGradient, "SH"},
    {ActionType::kReceiveFeatureGradient, "RH"},
    {ActionType::kReduceTied, "RT"},
    {ActionType::kReport, "RP"},
};

bool HasMicrobatch(ActionType type) { return type != ActionType::kReduceTied && type != ActionType::kReport; }

}  // namespace

std::string Action::ToString() const {
  std::string text = chunk == kVisionChunk ? "V" : absl::StrCat(chunk);
  for (const auto& [code_type, code] : kCodes) {
    if (code_type == type) absl::StrAppend(&text, code);
  }
  if (HasMicrobatch(type)) absl::StrAppend(&text, microbatch);
  return text;
}

absl::StatusOr<Action> ParseAction(absl::string_view text) {
  const absl::Status wrong =
      absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is no action; one looks like 2F0, VB3, 0SA1 or 1RP"));
  const auto is_digit = [](char c) { return absl::ascii_isdigit(static_cast<unsigned char>(c)); };
  size_t code_begin = 0;
  if (!text.empty() && text[0] == 'V') {
    code_begin = 1;
  } else {
    while (code_begin < text.size() && is_digit(text[code_begin])) ++code_begin;
  }
  size_t code_end = code_begin;
  while (code_end < text.size() && !is_digit(text[code_end])) ++code_end;

  Action action;
  if (text.substr(0, code_begin) == "V") {
    action.chunk = kVisionChunk;
  } else if (!absl::SimpleAtoi(text.substr(0, code_begin), &action.chunk)) {
    return wrong;
  }
  bool known = false;
  for (const auto& [type, code] : kCodes) {
    if (code == text.substr(code_begin, code_end - code_begin)) {
      action.type = type;
      known = true;
    }
  }
  if (!known) return wrong;
  if (HasMicrobatch(action.type) && !absl::SimpleAtoi(text.substr(code_end), &action.microbatch)) return wrong;
  // One spelling each: refuses leading zeros and a microbatch where there is none.
  if (action.ToString() != text) return wrong;
  return action;
}

std::string Schedule::ToString() const {
  std::string text;
  for (const WorkerActions& worker : workers) {
    absl::StrAppend(
        &text, absl::StrJoin(worker.actions, " ", [](std::string* out, const Action& a) { out->append(a.ToString()); }),
        "\n");
  }
  return text;
}

}  // namespace moonpipe
