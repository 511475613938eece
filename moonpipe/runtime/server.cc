#include "moonpipe/runtime/server.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/impl/server_builder_option.h"
#include "grpcpp/support/server_interceptor.h"
#include "moonpipe/base/listen_address.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

constexpr char kHealthService[] = "grpc.health.v1.Health";
constexpr char kReflectionService[] = "grpc.reflection.v1alpha.ServerReflection";
constexpr absl::Duration kDestructorGrace = absl::Seconds(1);
constexpr int kKeepaliveMs = 30000;
constexpr int kKeepaliveTimeoutMs = 10000;
// Clients of ours ping every 30 s and may be told to ping more often; gRPC's own limit is one ping in 5 minutes.
constexpr int kShortestPingIntervalMs = 5000;

std::chrono::system_clock::time_point After(absl::Duration duration) {
  return absl::ToChronoTime(absl::Now() + duration);
}

// Reports one call: when its status is sent, or when it ends without one.
class CallReporter : public grpc::experimental::Interceptor {
 public:
  CallReporter(std::string service, std::string method, const std::function<void(const FinishedRpc&)>& on_rpc)
      : service_(std::move(service)), method_(std::move(method)), on_rpc_(on_rpc), start_(absl::Now()) {}

  ~CallReporter() override { Report("CANCELLED"); }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(grpc::experimental::InterceptionHookPoints::PRE_SEND_STATUS)) {
      const auto code = static_cast<absl::StatusCode>(methods->GetSendStatus().error_code());
      Report(absl::StatusCodeToString(code));
    }
    methods->Proceed();
  }

 private:
  void Report(std::string code) {
    if (std::exchange(reported_, true)) return;
    on_rpc_({service_, method_, std::move(code), absl::Now() - start_});
  }

  const std::string service_;
  const std::string method_;
  const std::function<void(const FinishedRpc&)>& on_rpc_;
  const absl::Time start_;
  bool reported_ = false;
};

class CallReporterFactory : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  CallReporterFactory(std::function<void(const FinishedRpc&)> on_rpc, std::set<std::string> known)
      : on_rpc_(std::move(on_rpc)), known_(std::move(known)) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override {
    // "/package.Service/Method". Strangers' names would make as many time series as they like.
    const absl::string_view path = absl::StripPrefix(info->method(), "/");
    const size_t slash = path.rfind('/');
    const std::string service(path.substr(0, slash));
    if (slash == absl::string_view::npos || known_.count(service) == 0)
      return new CallReporter("unknown", "unknown", on_rpc_);
    return new CallReporter(service, std::string(path.substr(slash + 1)), on_rpc_);
  }

 private:
  const std::function<void(const FinishedRpc&)> on_rpc_;
  const std::set<std::string> known_;
};

// The reflection library adds its plugin to every server of the process by itself, where the linker keeps it. This
// option settles it by server: exactly once, or not at all.
class ReflectionOption : public grpc::ServerBuilderOption {
 public:
  explicit ReflectionOption(bool reflection) : reflection_(reflection) {}
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    auto ours = std::make_unique<grpc::reflection::ProtoServerReflectionPlugin>();
    const std::string name = ours->name();
    plugins->erase(
        std::remove_if(plugins->begin(), plugins->end(), [&](const auto& plugin) { return plugin->name() == name; }),
        plugins->end());
    if (reflection_) plugins->push_back(std::move(ours));
  }

 private:
  const bool reflection_;
};

// gRPC only logs why it could not bind; the same attempt by hand tells.
absl::Status TryToBind(const HostPort& address) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(absl::StrCat("its host is unknown (", ::gai_strerror(error), ")"));
  absl::Status status;
  const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd >= 0) {
    // As gRPC does: connections that linger in TIME_WAIT are no hindrance.
    const int on = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (::bind(fd, found->ai_addr, found->ai_addrlen) != 0) status = absl::UnavailableError(std::strerror(errno));
    ::close(fd);
  }
  ::freeaddrinfo(found);
  return status;
}

absl::StatusOr<std::unique_ptr<grpc::Server>> Build(grpc::ServerBuilder* builder, const std::string& listen,
                                                    const std::string& flag,
                                                    std::shared_ptr<grpc::ServerCredentials> credentials,
                                                    std::string* bound_address) {
  MOONPIPE_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(listen));
  const auto failed = [&](absl::string_view why) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", listen, ": ", why, "; choose another with ", flag,
                                               ", port 0 for any free one"));
  };
  if (const absl::Status bindable = TryToBind(address); !bindable.ok()) return failed(bindable.message());
  // With SO_REUSEPORT, gRPC's default, two services share a port in silence.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  int port = 0;
  builder->AddListeningPort(listen, std::move(credentials), &port);
  std::unique_ptr<grpc::Server> server = builder->BuildAndStart();
  if (server == nullptr || port == 0) return failed("gRPC could not bind it");
  *bound_address = FormatHostPort(address.host, port);
  return server;
}

void SetHealth(grpc::Server* server, const std::string& name, bool serving) {
  if (server != nullptr) server->GetHealthCheckService()->SetServingStatus(name, serving);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const ServerOptions& options,
                                                              const std::vector<ServedService>& services) {
  if (options.credentials == nullptr) {
    MOONPIPE_RETURN_IF_ERROR(CheckPlainTextAllowed(options.listen, options.insecure, "--listen"));
  }
  if (!options.health_listen.empty()) {
    MOONPIPE_RETURN_IF_ERROR(CheckPlainTextAllowed(options.health_listen, options.insecure, "--health-listen"));
  }
  grpc::EnableDefaultHealthCheckService(true);
  std::unique_ptr<GrpcServer> handle(new GrpcServer);

  grpc::ServerBuilder builder;
  std::set<std::string> known = {kHealthService, kReflectionService};
  for (const ServedService& served : services) {
    builder.RegisterService(served.service);
    handle->service_names_.push_back(served.name);
    known.insert(served.name);
  }
  builder.SetOption(std::make_unique<ReflectionOption>(true));
  builder.SetMaxReceiveMessageSize(options.max_receive_bytes);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kShortestPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  if (options.on_rpc != nullptr) {
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
    interceptors.push_back(std::make_unique<CallReporterFactory>(options.on_rpc, std::move(known)));
    builder.experimental().SetInterceptorCreators(std::move(interceptors));
  }
  const auto credentials = options.credentials != nullptr ? options.credentials : grpc::InsecureServerCredentials();
  MOONPIPE_ASSIGN_OR_RETURN(handle->server_,
                            Build(&builder, options.listen, "--listen", credentials, &handle->address_));
  if (!options.health_listen.empty()) {
    grpc::ServerBuilder health_builder;
    // gRPC wants a service besides its own Health that keeps the server polling; this one answers UNIMPLEMENTED to
    // everything.
    handle->nothing_else_ = std::make_unique<grpc::CallbackGenericService>();
    health_builder.RegisterCallbackGenericService(handle->nothing_else_.get());
    health_builder.SetOption(std::make_unique<ReflectionOption>(false));
    MOONPIPE_ASSIGN_OR_RETURN(handle->health_server_,
                              Build(&health_builder, options.health_listen, "--health-listen",
                                    grpc::InsecureServerCredentials(), &handle->health_address_));
  }
  for (grpc::Server* server : {handle->server_.get(), handle->health_server_.get()})
    SetHealth(server, "liveness", true);
  handle->SetReady(false);
  return handle;
}

GrpcServer::~GrpcServer() { Shutdown(kDestructorGrace); }

void GrpcServer::SetReady(bool ready) {
  for (grpc::Server* server : {server_.get(), health_server_.get()}) {
    SetHealth(server, "", ready);
    SetHealth(server, "readiness", ready);
    for (const std::string& name : service_names_) SetHealth(server, name, ready);
  }
}

void GrpcServer::Shutdown(absl::Duration grace) {
  if (server_ == nullptr) return;
  SetReady(false);
  server_->Shutdown(After(grace));
  server_->Wait();
  // The probe's port goes last: until here it says NOT_SERVING, which is truer than a refused connection.
  if (health_server_ != nullptr) {
    health_server_->Shutdown(After(absl::ZeroDuration()));
    health_server_->Wait();
  }
  health_server_.reset();
  server_.reset();
}

}  // namespace moonpipe
