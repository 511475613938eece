// The main function of a process that computes; vision encoder and decoder stage differ in their role alone.
#pragma once

#include <string>

#include "moonpipe/common/v1/common.pb.h"

namespace moonpipe {

int RunComputeMain(int argc, char** argv, const std::string& name, common::v1::WorkerRole role);

}  // namespace moonpipe
