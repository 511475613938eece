// moonpipe-gpu-check FIXTURE_FOLDER [DEVICE=cuda:0]: runs everything that needs a GPU, without services. Exit code 0 when all is well,
// 1 after a failure, 2 for wrong arguments, 77 where there is no CUDA device. With `cpu` as the device the checks of the model run
// against themselves, which tries the program on a machine without a GPU.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "absl/strings/str_cat.h"
#include "tests/gpu/report.h"
#include "tests/model/fixture.h"

namespace moonpipe::testing {

void GpuReport::Add(bool good, absl::string_view finding) {
  failed_ = failed_ || !good;
  std::printf("%-5s %.*s\n", good ? "ok" : "FAIL", static_cast<int>(finding.size()), finding.data());
  std::fflush(stdout);
}

void GpuReport::Note(absl::string_view finding) {
  std::printf("      %.*s\n", static_cast<int>(finding.size()), finding.data());
  std::fflush(stdout);
}

namespace {

template <typename Check>
void Run(const char* what, GpuReport& report, const Check& check) {
  try {
    check();
  } catch (const std::exception& error) {
    const std::string words = error.what();
    report.Add(false, absl::StrCat(what, " ended early: ", words.substr(0, words.find('\n'))));
  }
}

int Main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: %s FIXTURE_FOLDER [DEVICE=cuda:0]\n", argv[0]);
    return 2;
  }
  const std::string device = argc == 3 ? argv[2] : "cuda:0";
  const bool on_gpu = device != "cpu";
  if (on_gpu && !torch::cuda::is_available()) {
    std::printf("skipped: no CUDA device\n");
    return 77;
  }
  PinArithmetic(/*threads=*/4);
  // TensorFloat-32 keeps 10 bits of a product's factors; the comparison is about fp32.
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setAllowTF32CuDNN(false);
  GpuReport report;
  Run("model", report, [&] { CheckModel(argv[1], device, report); });
  if (on_gpu) Run("nccl", report, [&] { CheckNccl(report); });
  std::printf("%s\n", report.failed() ? "FAILED" : "all checks passed");
  return report.failed() ? 1 : 0;
}

}  // namespace
}  // namespace moonpipe::testing

int main(int argc, char** argv) {
  // cuBLAS is deterministic only with this, and reads it when it is loaded into use.
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
  return moonpipe::testing::Main(argc, argv);
}
