// The metrics of one process: a prometheus-cpp registry behind handles that keep it sound. What is counted stands in
// role_metrics.h; metrics_server.h serves the page.
//
// Handles are pointers into the registry: copy them freely, use them from any thread (one atomic operation each), keep
// the registry alive. A default-made handle counts nothing, so code may run without metrics.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace prometheus {
template <typename T>
class Family;
class Counter;
class Gauge;
class Histogram;
class Registry;
}  // namespace prometheus

namespace moonpipe {

using MetricLabels = std::map<std::string, std::string>;

// Grows only. NaN, infinities and negative amounts are not added: one of them would spoil the series for ever.
class CounterHandle {
 public:
  CounterHandle() = default;
  explicit CounterHandle(prometheus::Counter* counter) : counter_(counter) {}
  void Add(double amount = 1) const;
  double value() const;

 private:
  prometheus::Counter* counter_ = nullptr;
};

// Any value, NaN too: a loss that is not finite must show. The series is absent from the page until it is first set,
// for a gauge that says 0 lies: about a loss before the first step, about a peak that nobody measured, about the time
// of the last checkpoint.
class GaugeHandle {
 public:
  GaugeHandle() = default;
  GaugeHandle(prometheus::Family<prometheus::Gauge>* family, MetricLabels labels);
  void Set(double value) const;
  // 0 before the first Set.
  double value() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Finite observations; others are dropped.
class HistogramHandle {
 public:
  HistogramHandle() = default;
  explicit HistogramHandle(prometheus::Histogram* histogram) : histogram_(histogram) {}
  void Observe(double value) const;

 private:
  prometheus::Histogram* histogram_ = nullptr;
};

// Labels of moonpipe_build_info; `nccl` and `cuda` are "none" in a CPU build, `torch` is "none" in services without it.
struct BuildInfo {
  std::string version = "0.1.0";
  std::string commit = "unknown";
  std::string torch = "none";
  std::string nccl = "none";
  std::string cuda = "none";
};

class MetricsRegistry {
 public:
  // Exports moonpipe_build_info at once.
  explicit MetricsRegistry(const BuildInfo& build_info = {});

  // The series of a name and its labels; the same series each time. One name has one help text, kind and set of
  // buckets. Look-ups take a lock: keep the handle.
  CounterHandle Counter(const std::string& name, const std::string& help, const MetricLabels& labels);
  GaugeHandle Gauge(const std::string& name, const std::string& help, const MetricLabels& labels);
  HistogramHandle Histogram(const std::string& name, const std::string& help, const MetricLabels& labels,
                            const std::vector<double>& bucket_bounds);

  // The page: Prometheus text format.
  std::string Serialize() const;

  const std::shared_ptr<prometheus::Registry>& registry() const { return registry_; }

 private:
  std::shared_ptr<prometheus::Registry> registry_;
};

}  // namespace moonpipe
