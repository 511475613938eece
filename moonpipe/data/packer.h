// Whole documents into packed sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace moonpipe {

// Distributes documents of the given lengths over packs of at most `limit` tokens; no document is cut. Uses as few packs as the
// two rules below find, beginning at ceil(total / limit), and fills them as evenly as it can: each document, longest first, goes
// to the emptiest pack; where that overflows, to the fullest pack that still takes it. A pack lists its documents in rising
// order, and packs stand in the order of their first documents. Every length is at least 1 and at most `limit`.
std::vector<std::vector<size_t>> PackDocuments(absl::Span<const uint32_t> lengths, uint32_t limit);

}  // namespace moonpipe
