// `--set PATH=VALUE`: one field of a spec from the command line.
//
//   pipeline.stages=4
//   data.train=[a.tar, b.tar]              a list is replaced as a whole
//   optimizer.groups[0].learning_rate=1e-4 an index may be one past the end, which appends
//   vision={placement: first_stage}        any value of YAML; a mapping sets the fields it names
#pragma once

#include <string>

#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/config/spec_fields.h"

namespace moonpipe {

// Applies one override; `reader` gets its problems, with the whole override as their location.
void ApplyOverride(const std::string& text, SpecReader* reader, cluster::v1::TrainingRunSpec* spec);

}  // namespace moonpipe
