// What is wrong with one field of a message; the unit of every report about a bad spec, in the terminal and over the
// control API.
#pragma once

#include <string>

namespace moonpipe {

struct FieldViolation {
  std::string field;        // Path from the spec, as `--set` takes it: optimizer.groups[0].learning_rate
  std::string description;  // What is wrong, what was found and what is expected; a sentence without a full stop.
};

inline bool operator==(const FieldViolation& a, const FieldViolation& b) {
  return a.field == b.field && a.description == b.description;
}

}  // namespace moonpipe
