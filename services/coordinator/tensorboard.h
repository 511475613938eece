// A TensorBoard event file of a run: one record a step with the numbers of the step line, for `tensorboard --logdir RUN`.
//
// The file is a sequence of records: u64 length, u32 masked CRC-32C of the length, the event, u32 masked CRC-32C of the event, all
// little-endian; the mask turns a checksum right by 15 bits and adds 0xa282ead8. The first event names the format, brain.Event:2.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "moonpipe/cluster/v1/training_run.pb.h"

namespace moonpipe {

// The record that holds `event`.
std::string TensorBoardRecord(absl::string_view event);

// Writes a file of its own below `folder` for every start of a run. Values that cannot be written are lost without harm to the run.
class TensorBoardLog {
 public:
  // Makes folder and file. `first_step` is the next step of the run: TensorBoard drops what older files hold of it and of later steps,
  // so that a run which went back to a checkpoint shows one curve.
  TensorBoardLog(const std::string& folder, uint64_t first_step, absl::Time now);

  // train/loss, train/grad_norm, train/learning_rate, speed/tokens_per_second, speed/step_seconds, speed/bubble_ratio,
  // memory/peak_bytes, and speed/mfu where it is known. A skipped step has no loss and no norm.
  void Append(const cluster::v1::StepEvent& step, absl::Time now);

 private:
  std::ofstream file_;
};

}  // namespace moonpipe
