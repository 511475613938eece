#include "moonpipe/base/torch_status.h"

#include <torch/torch.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace moonpipe {

absl::Status StatusOfException(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::OutOfMemoryError& error) {
    return absl::ResourceExhaustedError(error.what_without_backtrace());
  } catch (const c10::ValueError& error) {
    return absl::InvalidArgumentError(error.what_without_backtrace());
  } catch (const c10::IndexError& error) {
    return absl::InvalidArgumentError(error.what_without_backtrace());
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    // The CPU allocator throws a plain error, known by its words only.
    if (absl::StrContains(message, "can't allocate memory")) return absl::ResourceExhaustedError(message);
    return absl::InternalError(message);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  } catch (...) {
    return absl::UnknownError("an exception of an unknown kind");
  }
}

}  // namespace moonpipe
