#include "moonpipe/metrics/registry.h"

#include <cmath>
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/metrics/role_metrics.h"

namespace moonpipe {
namespace {

using testing::HasSubstr;
using testing::Not;

const double kNan = std::numeric_limits<double>::quiet_NaN();
const double kInf = std::numeric_limits<double>::infinity();

TEST(Registry, ACounterTakesOnlyFinitePositiveAmounts) {
  MetricsRegistry registry;
  const CounterHandle counter = registry.Counter("x_total", "X.", {});
  counter.Add();
  counter.Add(2.5);
  for (const double bad : {kNan, kInf, -kInf, -1.0}) counter.Add(bad);
  EXPECT_EQ(counter.value(), 3.5);
  EXPECT_THAT(registry.Serialize(), HasSubstr("x_total 3.5"));
}

TEST(Registry, AGaugeShowsWhatIsNotFinite) {
  MetricsRegistry registry;
  registry.Gauge("x_ratio", "X.", {}).Set(kNan);
  EXPECT_THAT(registry.Serialize(), testing::ContainsRegex("x_ratio N[Aa]N?"));
}

TEST(Registry, AGaugeIsAbsentUntilItIsSet) {
  MetricsRegistry registry;
  const GaugeHandle gauge = registry.Gauge("x_ratio", "X.", {{"a", "1"}});
  EXPECT_THAT(registry.Serialize(), Not(HasSubstr("x_ratio{")));
  EXPECT_EQ(gauge.value(), 0);
  gauge.Set(0.5);
  registry.Gauge("x_ratio", "X.", {{"a", "1"}}).Set(0.75);
  EXPECT_THAT(registry.Serialize(), HasSubstr("x_ratio{a=\"1\"} 0.75\n"));
  EXPECT_EQ(gauge.value(), 0.75);
}

TEST(Registry, AHistogramDropsWhatIsNotFinite) {
  MetricsRegistry registry;
  const HistogramHandle histogram = registry.Histogram("x_seconds", "X.", {}, {1, 2});
  histogram.Observe(1.5);
  histogram.Observe(kNan);
  histogram.Observe(kInf);
  EXPECT_THAT(registry.Serialize(), HasSubstr("x_seconds_count 1\nx_seconds_sum 1.5\n"));
}

TEST(Registry, TheSameNameAndLabelsAreTheSameSeries) {
  MetricsRegistry registry;
  registry.Counter("x_total", "X.", {{"a", "1"}}).Add(1);
  registry.Counter("x_total", "X.", {{"a", "1"}}).Add(1);
  registry.Counter("x_total", "X.", {{"a", "2"}}).Add(5);
  EXPECT_EQ(registry.Counter("x_total", "X.", {{"a", "1"}}).value(), 2);
}

TEST(Registry, AnEmptyHandleCountsNothing) {
  CounterHandle().Add(1);
  GaugeHandle().Set(1);
  HistogramHandle().Observe(1);
  EXPECT_EQ(CounterHandle().value(), 0);
}

TEST(RoleMetrics, ThePeakIsAbsentUntilItIsKnown) {
  MetricsRegistry registry;
  const WorkerMetrics worker(&registry, "r", "0", "decoder", "cpu");
  EXPECT_THAT(registry.Serialize(), Not(HasSubstr("moonpipe_train_device_peak_flops_per_second{")));
  worker.device_peak.Set(5e10);
  EXPECT_THAT(
      registry.Serialize(),
      HasSubstr("moonpipe_train_device_peak_flops_per_second{role=\"decoder\",run=\"r\",stage=\"0\"} 50000000000"));
}

TEST(RoleMetrics, FlopsAreOneSeriesAPart) {
  MetricsRegistry registry;
  const WorkerMetrics worker(&registry, "r", "0", "decoder-stage", "cpu");
  EXPECT_THAT(registry.Serialize(), Not(HasSubstr("moonpipe_train_model_flops_total{")));
  worker.model_flops("decoder").Add(3);
  worker.model_flops("vision").Add(2);
  EXPECT_THAT(registry.Serialize(),
              HasSubstr("moonpipe_train_model_flops_total{part=\"decoder\",role=\"decoder-stage\",run=\"r\",stage=\"0\"} 3\n"));
  EXPECT_THAT(registry.Serialize(),
              HasSubstr("moonpipe_train_model_flops_total{part=\"vision\",role=\"decoder-stage\",run=\"r\",stage=\"0\"} 2\n"));
}

TEST(RoleMetrics, PhasesAreSeconds) {
  MetricsRegistry registry;
  const WorkerMetrics worker(&registry, "r", "1", "decoder", "cpu");
  worker.AddPhase(StagePhase::kReceive, absl::Milliseconds(250));
  EXPECT_THAT(registry.Serialize(),
              HasSubstr("moonpipe_stage_phase_seconds_total{phase=\"recv\",run=\"r\",stage=\"1\"} 0.25"));
}

TEST(RoleMetrics, TwoRunsHaveSeriesOfTheirOwn) {
  MetricsRegistry registry;
  const CoordinatorMetrics first(&registry, "a"), second(&registry, "b");
  first.steps.Add(3);
  second.steps.Add(4);
  EXPECT_THAT(registry.Serialize(), HasSubstr("moonpipe_train_steps_total{run=\"a\"} 3\n"));
  EXPECT_THAT(registry.Serialize(), HasSubstr("moonpipe_train_steps_total{run=\"b\"} 4\n"));
}

TEST(RoleMetrics, CallsAreCountedByServiceMethodAndCode) {
  MetricsRegistry registry;
  RpcServerMetrics(&registry).Observe("moonpipe.cluster.v1.ClusterService", "GetTrainingRun", "NOT_FOUND",
                                      absl::Milliseconds(2));
  EXPECT_THAT(
      registry.Serialize(),
      HasSubstr("moonpipe_rpc_server_duration_seconds_count{code=\"NOT_FOUND\",method=\"GetTrainingRun\","
                "service=\"moonpipe.cluster.v1.ClusterService\"} 1"));
}

}  // namespace
}  // namespace moonpipe
