// Log lines on standard error, one per statement, safe from any thread. Prefixed because c10 takes LOG and CHECK for itself.
//
//   MP_LOG(INFO) << "worker " << id << " connected";
//
// Text form: `I 12:34:56.789 coordinator] worker 3 connected`; JSON form: one object a line with time, severity, service, message.
#pragma once

#include <sstream>
#include <string>

namespace moonpipe {

enum class LogSeverity { kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

// Names this process in every line and picks the form. Call once at the head of main.
void InitLogging(const std::string& service, LogFormat format);
// The name that InitLogging was given.
std::string ServiceName();

namespace internal {
class LogMessage {
 public:
  explicit LogMessage(LogSeverity severity) : severity_(severity) {}
  ~LogMessage();
  LogMessage(const LogMessage&) = delete;
  LogMessage& operator=(const LogMessage&) = delete;
  std::ostream& stream() { return stream_; }

 private:
  LogSeverity severity_;
  std::ostringstream stream_;
};
}  // namespace internal
}  // namespace moonpipe

#define MP_LOG_SEVERITY_INFO ::moonpipe::LogSeverity::kInfo
#define MP_LOG_SEVERITY_WARNING ::moonpipe::LogSeverity::kWarning
#define MP_LOG_SEVERITY_ERROR ::moonpipe::LogSeverity::kError
#define MP_LOG(severity) ::moonpipe::internal::LogMessage(MP_LOG_SEVERITY_##severity).stream()
