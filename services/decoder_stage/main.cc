#include "moonpipe/runtime/compute_main.h"

int main(int argc, char** argv) {
  return moonpipe::RunComputeMain(argc, argv, "decoder-stage", moonpipe::common::v1::WORKER_ROLE_DECODER_STAGE);
}
