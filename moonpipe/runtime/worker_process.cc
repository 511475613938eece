#include "moonpipe/runtime/worker_process.h"

#include <unistd.h>

#include <array>
#include <utility>

#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/proto_digest.h"
#include "moonpipe/runtime/channel.h"

namespace moonpipe {

absl::StatusOr<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(const Options& options,
                                                                    const std::vector<ServedService>& services) {
  std::unique_ptr<WorkerProcess> process(new WorkerProcess(options.build));
  MOONPIPE_ASSIGN_OR_RETURN(process->metrics_server_,
                            MetricsServer::Start(options.flags.metrics_listen, options.flags.insecure, process->registry_));
  ServerOptions server;
  server.listen = options.flags.listen;
  server.health_listen = options.flags.health_listen;
  server.insecure = options.flags.insecure;
  server.on_rpc = [metrics = &process->rpc_metrics_](const FinishedRpc& rpc) {
    metrics->Observe(rpc.service, rpc.method, rpc.code, rpc.duration);
  };
  MOONPIPE_ASSIGN_OR_RETURN(process->server_, GrpcServer::Start(server, services));
  MOONPIPE_ASSIGN_OR_RETURN(const std::string address, options.flags.AdvertisedAddress(process->server_->address()));

  CoordinatorClient::Options client;
  client.channel = MakeChannel(options.flags.coordinator);
  worker::v1::Register& registration = client.registration;
  registration.set_role(options.role);
  registration.set_ordinal(options.ordinal);
  registration.set_address(address);
  registration.set_metrics_address(process->metrics_server_->address());
  registration.set_proto_digest(kProtoDigest);
  registration.set_boot_id(options.boot_id);
  registration.set_process_id(static_cast<uint64_t>(::getpid()));
  registration.set_device(options.device);
  registration.set_peak_flops_per_second(options.peak_flops_per_second);
  registration.set_peak_source(options.peak_source);
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) == 0) registration.set_host(host.data());
  MOONPIPE_ASSIGN_OR_RETURN(process->client_, CoordinatorClient::Connect(std::move(client)));
  process->server_->SetReady(true);
  MOONPIPE_RETURN_IF_ERROR(options.flags.WriteAddress(address));
  return process;
}

WorkerProcess::~WorkerProcess() {
  if (server_ != nullptr) server_->SetReady(false);
  client_.reset();
  if (server_ != nullptr) server_->Shutdown(absl::Seconds(2));
}

int ExitCode(const absl::Status& status) {
  if (status.ok()) return 0;
  MP_LOG(ERROR) << status.message();
  return 1;
}

}  // namespace moonpipe
