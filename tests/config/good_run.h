// A small run file that is complete, for tests to spoil.
#pragma once

namespace moonpipe {

inline constexpr char kGoodRun[] =
    "model: {config: model/config.json}\n"   // line 1
    "data:\n"                                // line 2
    "  train: train-{000000..000002}.tar\n"  // line 3
    "  tokenizer: tokenizer\n"               // line 4
    "pipeline:\n"                            // line 5
    "  microbatch_tokens: 512\n"             // line 6
    "train: {steps: 200}\n"                  // line 7
    "optimizer: {learning_rate: 1e-3}\n";    // line 8

}  // namespace moonpipe
