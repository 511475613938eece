#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>

#include <chrono>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "moonpipe/comm/in_memory_rendezvous.h"
#include "moonpipe/comm/nccl_edge.h"
#include "moonpipe/comm/stream_store.h"
#include "tests/gpu/report.h"

namespace moonpipe::testing {
namespace {

void CheckGroup(GpuReport& report) {
  InMemoryRendezvous rendezvous;
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = std::chrono::seconds(60);
  const auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      c10::make_intrusive<StreamStore>(&rendezvous, "nccl/1/check/", std::chrono::seconds(60)), 0, 1, options);
  const at::Tensor want = at::arange(1 << 20, at::kFloat);
  std::vector<at::Tensor> tensors = {want.to(at::Device(at::kCUDA, 0))};
  const absl::Time begin = absl::Now();
  group->allreduce(tensors)->wait();
  const bool equal = at::equal(tensors.front().cpu(), want);
  report.Add(equal, absl::StrFormat("nccl group of one rank: all-reduce of %d floats over our store, first call %.0f ms", want.numel(),
                                    absl::ToDoubleMilliseconds(absl::Now() - begin)));
  const absl::Time abort = absl::Now();
  group->abort();
  report.Add(true, absl::StrFormat("nccl group of one rank: aborted in %.0f ms", absl::ToDoubleMilliseconds(absl::Now() - abort)));
}

// Two ends need two GPUs; what one GPU can show is that a lone end is built, refuses what it must, and ends.
void CheckEdge(GpuReport& report) {
  InMemoryRendezvous rendezvous;
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  const int devices = c10::cuda::device_count();
  const auto beyond = MakeNcclEdge({.name = "check", .generation = 1, .sends = true, .device = devices}, &rendezvous, deadline);
  report.Add(beyond.status().code() == absl::StatusCode::kInvalidArgument,
             absl::StrCat("nccl edge on device ", devices, " of ", devices, ": ", beyond.status().ToString()));
  auto edge = MakeNcclEdge({.name = "check", .generation = 1, .sends = true, .device = 0}, &rendezvous, deadline);
  report.Add(edge.ok(), absl::StrCat("nccl edge on device 0: ", edge.status().ToString()));
  if (!edge.ok()) return;
  const absl::Status from_host = (*edge)->Send(at::ones({4}), deadline);
  report.Add(from_host.code() == absl::StatusCode::kInvalidArgument, absl::StrCat("nccl edge, tensor of the host: ", from_host.ToString()));
  (*edge)->Abort(absl::AbortedError("the check ends it"));
  const absl::Status after = (*edge)->Send(at::ones({4}, at::Device(at::kCUDA, 0)), deadline);
  report.Add(after.code() == absl::StatusCode::kAborted && absl::StrContains(after.message(), "the check ends it"),
             absl::StrCat("nccl edge after Abort: ", after.ToString()));
}

}  // namespace

void CheckNccl(GpuReport& report) {
  CheckGroup(report);
  CheckEdge(report);
}

}  // namespace moonpipe::testing
