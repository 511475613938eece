#include "moonpipe/runtime/compute_main.h"

int main(int argc, char** argv) {
  return moonpipe::RunComputeMain(argc, argv, "vision-encoder", moonpipe::common::v1::WORKER_ROLE_VISION_ENCODER);
}
