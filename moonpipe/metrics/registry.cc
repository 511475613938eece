#include "moonpipe/metrics/registry.h"

#include <atomic>
#include <cmath>
#include <utility>

#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

namespace moonpipe {

void CounterHandle::Add(double amount) const {
  if (counter_ != nullptr && std::isfinite(amount) && amount > 0) counter_->Increment(amount);
}

double CounterHandle::value() const { return counter_ == nullptr ? 0 : counter_->Value(); }

struct GaugeHandle::State {
  prometheus::Family<prometheus::Gauge>* family;
  MetricLabels labels;
  std::atomic<prometheus::Gauge*> gauge = nullptr;
};

GaugeHandle::GaugeHandle(prometheus::Family<prometheus::Gauge>* family, MetricLabels labels)
    : state_(std::make_shared<State>()) {
  state_->family = family;
  state_->labels = std::move(labels);
}

void GaugeHandle::Set(double value) const {
  if (state_ == nullptr) return;
  prometheus::Gauge* gauge = state_->gauge.load(std::memory_order_acquire);
  if (gauge == nullptr) {
    // Two threads may both come here: the family gives both the same series.
    gauge = &state_->family->Add(state_->labels, value);
    state_->gauge.store(gauge, std::memory_order_release);
  }
  gauge->Set(value);
}

double GaugeHandle::value() const {
  const prometheus::Gauge* gauge = state_ == nullptr ? nullptr : state_->gauge.load(std::memory_order_acquire);
  return gauge == nullptr ? 0 : gauge->Value();
}

void HistogramHandle::Observe(double value) const {
  if (histogram_ != nullptr && std::isfinite(value)) histogram_->Observe(value);
}

MetricsRegistry::MetricsRegistry(const BuildInfo& build_info) : registry_(std::make_shared<prometheus::Registry>()) {
  Gauge("moonpipe_build_info", "What this process was built from; always 1.",
        {{"version", build_info.version},
         {"commit", build_info.commit},
         {"torch", build_info.torch},
         {"nccl", build_info.nccl},
         {"cuda", build_info.cuda}})
      .Set(1);
}

// Registering a name again with the same help returns the same family.
CounterHandle MetricsRegistry::Counter(const std::string& name, const std::string& help, const MetricLabels& labels) {
  return CounterHandle(&prometheus::BuildCounter().Name(name).Help(help).Register(*registry_).Add(labels));
}

GaugeHandle MetricsRegistry::Gauge(const std::string& name, const std::string& help, const MetricLabels& labels) {
  return GaugeHandle(&prometheus::BuildGauge().Name(name).Help(help).Register(*registry_), labels);
}

HistogramHandle MetricsRegistry::Histogram(const std::string& name, const std::string& help, const MetricLabels& labels,
                                           const std::vector<double>& bucket_bounds) {
  return HistogramHandle(
      &prometheus::BuildHistogram().Name(name).Help(help).Register(*registry_).Add(labels, bucket_bounds));
}

std::string MetricsRegistry::Serialize() const { return prometheus::TextSerializer().Serialize(registry_->Collect()); }

}  // namespace moonpipe
