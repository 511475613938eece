// The run file: YAML in the schema of cluster.v1.TrainingRunSpec.
//
//   model: {config: model/config.json}
//   data:
//     train: train-{000000..000002}.tar     # a list or a single value
//     tokenizer: tokenizer
//   pipeline: {stages: 2, microbatch_tokens: 512}
//   vision: {placement: first_stage}        # enum values without prefix, in lower case, `-` for `_` as you like
//   train: {steps: 200}
//   optimizer: {learning_rate: 1e-3}
//
// Anchors, aliases and merge keys (`<<`) work; a key given twice, an unknown field, a value of another type are errors.
// All problems are reported at once, each with file, line, column and the field's path.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "moonpipe/cluster/v1/training_run_spec.pb.h"
#include "moonpipe/config/field_violation.h"

namespace moonpipe {

// Reads, overrides (see overrides.h), resolves relative paths against the file's folder, fills in the defaults and
// validates. NOT_FOUND where the file is missing; INVALID_ARGUMENT with every problem, one a line:
//   run.yaml has 2 problems:
//     run.yaml:3:5: pipeline.stagse: no such field; did you mean stages?
//     run.yaml:7:3: train.steps: expected a whole number from 0 to 18446744073709551615; found "many"
absl::StatusOr<cluster::v1::TrainingRunSpec> LoadRunFile(const std::string& path,
                                                         const std::vector<std::string>& overrides = {});

// The same from text. `name` stands in messages, relative paths are taken from `folder`.
absl::StatusOr<cluster::v1::TrainingRunSpec> ParseRunFile(const std::string& text, const std::string& name,
                                                          const std::string& folder,
                                                          const std::vector<std::string>& overrides = {});

// Makes model.path, model.config, data.train, data.tokenizer and eval.sets[].files absolute: a relative one lies in
// `folder`.
void ResolvePaths(const std::string& folder, cluster::v1::TrainingRunSpec* spec);

// Where a preprocessor_config.json may be, in order of precedence: beside the weights or the configuration, or beside the tokenizer, where
// machines without the weights have it.
std::vector<std::string> PreprocessorFolders(const cluster::v1::TrainingRunSpec& spec);

// Fills every absent field that has a default with the one that its proto comment names. Idempotent.
void ResolveDefaults(cluster::v1::TrainingRunSpec* spec);

// Every required field that is missing, value out of range and contradiction; empty for a good spec. Absent optional
// fields count with their defaults. Looks at no file.
std::vector<FieldViolation> ValidateSpec(const cluster::v1::TrainingRunSpec& spec);

// The spec as a run file in the order of the proto's fields; fields that are absent are left out. ParseRunFile reads it
// back to an equal message.
std::string WriteYaml(const cluster::v1::TrainingRunSpec& spec);

}  // namespace moonpipe
