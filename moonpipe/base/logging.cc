#include "moonpipe/base/logging.h"

#include <unistd.h>

#include <mutex>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

struct Sink {
  std::mutex mutex;
  std::string service = "moonpipe";
  LogFormat format = LogFormat::kText;
};

Sink& GlobalSink() {
  static Sink* sink = new Sink;  // Never destroyed: threads may log while the process exits.
  return *sink;
}

}  // namespace

void InitLogging(const std::string& service, LogFormat format) {
  Sink& sink = GlobalSink();
  std::lock_guard<std::mutex> lock(sink.mutex);
  sink.service = service;
  sink.format = format;
}

std::string ServiceName() {
  Sink& sink = GlobalSink();
  std::lock_guard<std::mutex> lock(sink.mutex);
  return sink.service;
}

namespace internal {

LogMessage::~LogMessage() {
  Sink& sink = GlobalSink();
  const absl::Time now = absl::Now();
  std::lock_guard<std::mutex> lock(sink.mutex);
  std::string line;
  if (sink.format == LogFormat::kJson) {
    static constexpr const char* kNames[] = {"INFO", "WARNING", "ERROR"};
    nlohmann::ordered_json object;
    object["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", now, absl::UTCTimeZone());
    object["severity"] = kNames[static_cast<int>(severity_)];
    object["service"] = sink.service;
    object["message"] = stream_.str();
    line = object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  } else {
    static constexpr char kLetters[] = {'I', 'W', 'E'};
    line = std::string(1, kLetters[static_cast<int>(severity_)]) + " " +
           absl::FormatTime("%H:%M:%E3S", now, absl::LocalTimeZone()) + " " + sink.service + "] " + stream_.str();
  }
  line += '\n';
  // One write, so that lines of several processes on one terminal do not mix.
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = ::write(STDERR_FILENO, line.data() + done, line.size() - done);
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
}

}  // namespace internal
}  // namespace moonpipe
