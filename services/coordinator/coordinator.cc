#include "services/coordinator/coordinator.h"

#include <unistd.h>

#include <array>

#include "absl/time/clock.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/proto_digest.h"
#include "services/coordinator/run_driver.h"

namespace moonpipe {
namespace {

// How long drained workers may take to leave.
constexpr absl::Duration kLeave = absl::Seconds(5);
// Reports and manifests grow with the model; the control API's requests stay small all the same.
constexpr int kMaxReceiveBytes = 64 << 20;

std::string HostName() {
  std::array<char, 256> host{};
  (void)::gethostname(host.data(), host.size() - 1);
  return host.data();
}

}  // namespace

Coordinator::Coordinator(const std::string& runs_folder)
    : rpc_metrics_(&registry_), hub_({.proto_digest = kProtoDigest}), runs_(runs_folder), control_(&runs_) {}

absl::StatusOr<std::unique_ptr<Coordinator>> Coordinator::Start(const ServiceFlags& flags, const std::string& runs_folder) {
  std::unique_ptr<Coordinator> self(new Coordinator(runs_folder));
  MOONPIPE_ASSIGN_OR_RETURN(self->metrics_, MetricsServer::Start(flags.metrics_listen, flags.insecure, self->registry_));
  ServerOptions options;
  options.listen = flags.listen;
  options.health_listen = flags.health_listen;
  options.insecure = flags.insecure;
  options.max_receive_bytes = kMaxReceiveBytes;
  options.on_rpc = [metrics = &self->rpc_metrics_](const FinishedRpc& rpc) {
    metrics->Observe(rpc.service, rpc.method, rpc.code, rpc.duration);
  };
  MOONPIPE_ASSIGN_OR_RETURN(self->server_,
                            GrpcServer::Start(options, {{&self->control_, cluster::v1::ClusterService::service_full_name()},
                                                        {&self->hub_, worker::v1::WorkerService::service_full_name()}}));
  MOONPIPE_ASSIGN_OR_RETURN(self->address_, flags.AdvertisedAddress(self->server_->address()));
  self->driver_ = std::thread([coordinator = self.get()] {
    uint64_t generation = 0;
    const RunDriverOptions driver{&coordinator->hub_, &coordinator->runs_, &coordinator->registry_, &generation,
                                  ServiceEntry{"coordinator", "coordinator", 0, coordinator->address_, coordinator->metrics_address(),
                                               HostName(), static_cast<uint64_t>(::getpid())}};
    while (!coordinator->ending_) {
      const auto job = coordinator->runs_.WaitForJob(absl::Now() + absl::Milliseconds(200));
      if (job.ok()) DriveRun(driver, *job);
    }
  });
  self->server_->SetReady(true);
  MP_LOG(INFO) << "serving on " << self->address_ << ", metrics on " << self->metrics_address();
  return self;
}

Coordinator::~Coordinator() { Stop(); }

void Coordinator::Stop() {
  if (!driver_.joinable()) return;
  server_->SetReady(false);
  ending_ = true;
  for (const auto& run : runs_.List()) {
    if (!HasEnded(run.state())) (void)runs_.Command(run.name(), RunCommand::kStop, "");
  }
  driver_.join();
  hub_.Shutdown(kLeave);
  server_->Shutdown(absl::Seconds(2));
}

}  // namespace moonpipe
