#include "moonpipe/metrics/metrics_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/metrics/role_metrics.h"

namespace moonpipe {
namespace {

using testing::HasSubstr;

// One GET over a socket: headers and body.
std::string Get(int port, const std::string& path) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(::send(fd, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t n; (n = ::recv(fd, buffer, sizeof(buffer), 0)) > 0;) answer.append(buffer, static_cast<size_t>(n));
  ::close(fd);
  return answer;
}

std::string Body(const std::string& answer) { return answer.substr(answer.find("\r\n\r\n") + 4); }

// Every series that moonpipe can export.
void TouchEverything(MetricsRegistry* registry) {
  CoordinatorMetrics coordinator(registry, "digits");
  for (const GaugeHandle* gauge :
       {&coordinator.loss_max, &coordinator.balance_loss, &coordinator.grad_norm, &coordinator.vision_learning_rate,
        &coordinator.projector_learning_rate, &coordinator.decoder_learning_rate, &coordinator.last_step_timestamp,
        &coordinator.target_steps, &coordinator.checkpoint_last_success_timestamp}) {
    gauge->Set(1);
  }
  coordinator.loss.Set(std::numeric_limits<double>::quiet_NaN());
  coordinator.step_duration.Observe(0.3);
  coordinator.checkpoint_write_duration.Observe(1);
  coordinator.stage_restarts("0", "lost").Add();
  for (const char* stage : {"vision", "0"}) {
    WorkerMetrics worker(registry, "digits", stage, stage[0] == 'v' ? "vision" : "decoder", "cpu");
    worker.device_peak.Set(5e10);
    const CounterHandle flops = worker.model_flops(stage[0] == 'v' ? "vision" : "decoder");
    flops.Add(1e9);
    flops.Add(std::numeric_limits<double>::quiet_NaN());
    for (const MemoryKind kind : {MemoryKind::kAllocated, MemoryKind::kReserved, MemoryKind::kPeak})
      worker.SetMemory(kind, 1e6);
    worker.expert_load_max_ratio.Set(1.5);
    worker.comm_errors("unavailable").Add();
    worker.dataloader_wait.Observe(0.01);
    worker.vision_queue.Observe(0.01);
  }
  EdgeMetrics(registry, "digits", "0", "features", "recv", "unix").payload_bytes.Add(4096);
  const DataloaderMetrics dataloader(registry, "digits");
  dataloader.step_duration.Observe(0.02);
  dataloader.prefetched_steps.Set(2);
  RpcServerMetrics(registry).Observe("moonpipe.cluster.v1.ClusterService", "GetTrainingRun", "OK",
                                     absl::Milliseconds(1));
}

TEST(MetricsServer, IsScrapedOverASocket) {
  MetricsRegistry registry({.version = "0.1.0", .commit = "abc", .torch = "2.11.0"});
  const auto server = MetricsServer::Start("127.0.0.1:0", false, registry);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_GT((*server)->port(), 0);
  EXPECT_EQ((*server)->address(), absl::StrCat("127.0.0.1:", (*server)->port()));
  const CounterHandle counter = registry.Counter("x_total", "X.", {});
  counter.Add(7);
  const std::string answer = Get((*server)->port(), "/metrics");
  EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 200")) << answer;
  EXPECT_THAT(answer, HasSubstr("x_total 7"));
  EXPECT_THAT(
      answer,
      HasSubstr(
          "moonpipe_build_info{commit=\"abc\",cuda=\"none\",nccl=\"none\",torch=\"2.11.0\",version=\"0.1.0\"} 1"));
  counter.Add(1);
  EXPECT_THAT(Get((*server)->port(), "/metrics"), HasSubstr("x_total 8"));
  EXPECT_TRUE(absl::StartsWith(Get((*server)->port(), "/other"), "HTTP/1.1 404"));
}

TEST(MetricsServer, APortInUseNamesPortAndFlag) {
  MetricsRegistry registry;
  const auto first = MetricsServer::Start("127.0.0.1:0", false, registry);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = MetricsServer::Start((*first)->address(), false, registry);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(), HasSubstr(absl::StrCat((*first)->port())));
  EXPECT_THAT(second.status().message(), HasSubstr("--metrics-listen"));
}

TEST(MetricsServer, BeyondLoopbackNeedsToBeAskedFor) {
  MetricsRegistry registry;
  EXPECT_EQ(MetricsServer::Start("0.0.0.0:0", false, registry).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MetricsServer::Start("0.0.0.0", true, registry).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(MetricsServer::Start("0.0.0.0:0", true, registry).ok());
  EXPECT_TRUE(MetricsServer::Start("localhost:0", false, registry).ok());
}

// The text format, read strictly: TYPE before samples, legal names, one line a series, counters that are finite.
TEST(MetricsPage, IsStrictlyParsed) {
  MetricsRegistry registry;
  TouchEverything(&registry);
  const auto server = MetricsServer::Start("127.0.0.1:0", false, registry);
  ASSERT_TRUE(server.ok()) << server.status();
  std::istringstream page(Body(Get((*server)->port(), "/metrics")));
  const std::regex help("# HELP (moonpipe_[a-z_]+) [A-Z].*\\."),
      type("# TYPE (moonpipe_[a-z_]+) (counter|gauge|histogram)");
  const std::regex sample("(moonpipe_[a-z_]+)(\\{([a-z_]+=\"[^\"\\\\\n]*\",?)*\\})? ([-+.0-9eE]+|N[aA][nN]|[+-]?Inf)");
  std::map<std::string, std::string> types;
  std::set<std::string> series;
  std::string line;
  std::smatch match;
  while (std::getline(page, line)) {
    // The HTTP library counts itself under its own names.
    if (absl::StrContains(line, "exposer_")) continue;
    if (std::regex_match(line, match, help)) continue;
    if (std::regex_match(line, match, type)) {
      EXPECT_TRUE(types.emplace(match[1], match[2]).second) << line;
      continue;
    }
    ASSERT_TRUE(std::regex_match(line, match, sample)) << line;
    EXPECT_TRUE(series.insert(line.substr(0, line.rfind(' '))).second) << line;
    std::string name = match[1];
    if (types.count(name) == 0) name = std::regex_replace(name, std::regex("_(bucket|sum|count)$"), "");
    ASSERT_EQ(types.count(name), 1u) << line;
    if (types[name] == "counter") {
      EXPECT_TRUE(absl::EndsWith(name, "_total")) << name;
      EXPECT_TRUE(std::isfinite(std::strtod(match[4].str().c_str(), nullptr))) << line;
    } else {
      EXPECT_FALSE(absl::EndsWith(name, "_total")) << name;
    }
  }
  EXPECT_GE(types.size(), 35u);
}

TEST(MetricsPage, PassesPromtool) {
  if (std::system("command -v promtool > /dev/null") != 0)
    GTEST_SKIP() << "promtool is not installed (Debian package prometheus)";
  MetricsRegistry registry;
  TouchEverything(&registry);
  const auto server = MetricsServer::Start("127.0.0.1:0", false, registry);
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string path = absl::StrCat(testing::TempDir(), "/page.", ::getpid());
  FILE* file = std::fopen(path.c_str(), "w");
  ASSERT_NE(file, nullptr);
  const std::string page = Body(Get((*server)->port(), "/metrics"));
  ASSERT_EQ(std::fwrite(page.data(), 1, page.size(), file), page.size());
  std::fclose(file);
  FILE* promtool = ::popen(absl::StrCat("promtool check metrics < ", path, " 2>&1").c_str(), "r");
  std::string output;
  char buffer[512];
  while (std::fgets(buffer, sizeof(buffer), promtool) != nullptr) output += buffer;
  EXPECT_EQ(::pclose(promtool), 0) << output;
  EXPECT_EQ(output, "");
  std::remove(path.c_str());
}

}  // namespace
}  // namespace moonpipe
