// Fetches a worker's views of the microbatches of a step, ahead of their use and in order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/channel.h"
#include "moonpipe/data/v1/data_service.pb.h"

namespace moonpipe {

class MicrobatchClient {
 public:
  struct Options {
    std::shared_ptr<grpc::Channel> channel;
    uint64_t generation = 0;
    std::string access_token;
    // A view that is larger is refused.
    uint64_t max_view_bytes = uint64_t{1} << 32;
  };
  explicit MicrobatchClient(Options options);
  ~MicrobatchClient();

  struct Wanted {
    uint32_t microbatch = 0;
    data::v1::MicrobatchView view = data::v1::MICROBATCH_VIEW_UNSPECIFIED;
  };
  // Begins to fetch in the background, in this order; whatever an earlier call left unread is dropped.
  void Prefetch(uint64_t step, std::vector<Wanted> wanted, absl::Time deadline);
  // Blocks until the bytes are there; each can be taken once. The fetch's own error, with step, microbatch and view in the message.
  absl::StatusOr<std::string> Take(uint32_t microbatch, data::v1::MicrobatchView view, absl::Time deadline);
  // Ends every wait, now and later. Safe from any thread.
  void Abort(const absl::Status& reason);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moonpipe
