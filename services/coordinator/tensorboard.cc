#include "services/coordinator/tensorboard.h"

#include <bit>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "moonpipe/comm/crc32c.h"
#include "moonpipe/tensorboard/v1/event.pb.h"

namespace moonpipe {
namespace {

using tensorboard::v1::Event;

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie in memory");

uint32_t MaskedCrc(absl::string_view bytes) {
  return std::rotr(Crc32c(bytes.data(), bytes.size()), 15) + 0xa282ead8U;
}

template <typename T>
void AppendNumber(T number, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&number), sizeof number);
}

void Write(const Event& event, std::ofstream& file) { file << TensorBoardRecord(event.SerializeAsString()) << std::flush; }

Event EventAt(uint64_t step, absl::Time time) {
  Event event;
  event.set_wall_time(absl::ToDoubleSeconds(time - absl::UnixEpoch()));
  event.set_step(static_cast<int64_t>(step));
  return event;
}

}  // namespace

std::string TensorBoardRecord(absl::string_view event) {
  std::string record;
  AppendNumber(static_cast<uint64_t>(event.size()), &record);
  const uint32_t length_crc = MaskedCrc(record);
  AppendNumber(length_crc, &record);
  record.append(event.data(), event.size());
  AppendNumber(MaskedCrc(event), &record);
  return record;
}

TensorBoardLog::TensorBoardLog(const std::string& folder, uint64_t first_step, absl::Time now) {
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  // TensorBoard reads the files of a folder in the order of their names: the time comes first, and a start within the same second
  // gets the next number.
  std::string path;
  int number = 0;
  do {
    path = absl::StrCat(folder, "/events.out.tfevents.", absl::ToUnixSeconds(now), ".moonpipe.", absl::Dec(number++, absl::kZeroPad4));
  } while (std::filesystem::exists(path));
  file_.open(path, std::ios::binary);
  Event format = EventAt(0, now);
  format.set_file_version("brain.Event:2");
  Write(format, file_);
  Event start = EventAt(first_step, now);
  start.mutable_session_log()->set_status(tensorboard::v1::SessionLog::SESSION_STATUS_START);
  Write(start, file_);
}

void TensorBoardLog::Append(const cluster::v1::StepEvent& step, absl::Time now) {
  Event event = EventAt(step.step(), now);
  auto add = [&event](const char* tag, double value) {
    tensorboard::v1::Summary::Value& entry = *event.mutable_summary()->add_value();
    entry.set_tag(tag);
    entry.set_simple_value(static_cast<float>(value));
  };
  if (step.skip_reason().empty()) {
    add("train/loss", step.loss());
    add("train/grad_norm", step.grad_norm());
  }
  add("train/learning_rate", step.learning_rate());
  if (step.seconds() > 0) add("speed/tokens_per_second", static_cast<double>(step.tokens()) / step.seconds());
  add("speed/step_seconds", step.seconds());
  add("speed/bubble_ratio", step.bubble_ratio());
  if (step.has_mfu()) add("speed/mfu", step.mfu());
  add("memory/peak_bytes", static_cast<double>(step.peak_memory_bytes()));
  Write(event, file_);
}

}  // namespace moonpipe
