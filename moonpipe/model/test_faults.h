// Deliberate mistakes in the arithmetic, by which tests show that a comparison with recordings notices each of them. All are off unless
// the environment variable MOONPIPE_TEST_FAULT names one when it is first asked for; another name ends the process, since a mistake that
// silently never happens would let a test pass.
#pragma once

namespace moonpipe {

enum class TestFault {
  kPatchPairOrder,  // patch-pair-order: rows and columns change places in the rotary pairs of pictures
  kErfGelu,         // erf-gelu: the tower's GELU is the exact one
  kNoMscale,        // no-mscale: attention scores lack YaRN's squared magnitude
  kCubicConstant,   // cubic-constant: the position table is interpolated with -0.5 instead of -0.75
  kNoDocumentMask,  // no-document-mask: documents of a microbatch see each other
};

bool HasTestFault(TestFault fault);

}  // namespace moonpipe
