// The machine and the libraries that a run's bits depend on; checkpoints record them.
#pragma once

#include <string>

namespace moonpipe {

// Of the wheel that every worker of this build links.
inline constexpr char kTorchVersion[] = MOONPIPE_TORCH_VERSION;

// Model name of the first processor; "unknown" where the system does not tell.
std::string CpuModel();

}  // namespace moonpipe
