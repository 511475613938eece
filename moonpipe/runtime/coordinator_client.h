// A worker's end of the one stream to the coordinator: commands come down in order, events go up, and the rendezvous of edges
// passes beside them. Built on the callback API: no reactor ever blocks, and Send only enqueues.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/channel.h"
#include "moonpipe/comm/rendezvous.h"
#include "moonpipe/worker/v1/worker_service.pb.h"

namespace moonpipe {

class CoordinatorClient {
 public:
  struct Options {
    std::shared_ptr<grpc::Channel> channel;
    worker::v1::Register registration;
    // Longest wait for the coordinator to come up and to answer.
    absl::Duration connect_timeout = absl::Seconds(60);
  };

  // Registers and waits for the welcome. UNAVAILABLE names the coordinator's address state; FAILED_PRECONDITION when the coordinator
  // was built from other protos; ALREADY_EXISTS when the place is taken.
  static absl::StatusOr<std::unique_ptr<CoordinatorClient>> Connect(Options options);
  ~CoordinatorClient();

  uint32_t worker() const;

  // Enqueues an event; never blocks. Events after the stream broke are dropped.
  void Send(worker::v1::ConnectRequest event);

  // The next command, in the order sent. Blocks to the deadline (DEADLINE_EXCEEDED); UNAVAILABLE once the stream is broken.
  absl::StatusOr<worker::v1::ConnectResponse> Next(absl::Time deadline);

  // What the heartbeats say the worker does. Cheap; call it at every action.
  void SetActivity(std::string activity, std::string waiting_for);

  // Called once, from another thread, when whatever the worker does now should end at once: the stream broke, or the coordinator
  // drains the worker. Set before a plan is carried out.
  void OnInterrupt(std::function<void(const absl::Status& reason)> callback);

  // Rendezvous through the coordinator for one plan. Lives as long as the client.
  std::unique_ptr<Rendezvous> MakeRendezvous(uint64_t generation);

 private:
  class Impl;
  explicit CoordinatorClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moonpipe
