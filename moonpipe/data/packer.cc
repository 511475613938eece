#include "moonpipe/data/packer.h"

#include <algorithm>
#include <numeric>

namespace moonpipe {
namespace {

using Packs = std::vector<std::vector<size_t>>;

// Empty when a document fits nowhere. `order` is longest first; `prefer(a, b)`: a pack filled to a is taken before one filled to b.
template <typename Prefer>
Packs Distribute(absl::Span<const uint32_t> lengths, const std::vector<size_t>& order, uint32_t limit, size_t count, Prefer prefer) {
  Packs packs(count);
  std::vector<uint64_t> filled(count);
  for (const size_t document : order) {
    size_t best = count;
    for (size_t pack = 0; pack < count; ++pack) {
      if (filled[pack] + lengths[document] > limit) continue;
      if (best == count || prefer(filled[pack], filled[best])) best = pack;
    }
    if (best == count) return {};
    packs[best].push_back(document);
    filled[best] += lengths[document];
  }
  return packs;
}

}  // namespace

Packs PackDocuments(absl::Span<const uint32_t> lengths, uint32_t limit) {
  if (lengths.empty()) return {};
  std::vector<size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });
  const uint64_t total = std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
  Packs packs;
  for (size_t count = (total + limit - 1) / limit; packs.empty(); ++count) {
    packs = Distribute(lengths, order, limit, count, [](uint64_t a, uint64_t b) { return a < b; });
    if (packs.empty()) packs = Distribute(lengths, order, limit, count, [](uint64_t a, uint64_t b) { return a > b; });
  }
  for (std::vector<size_t>& pack : packs) std::sort(pack.begin(), pack.end());
  std::sort(packs.begin(), packs.end());
  return packs;
}

}  // namespace moonpipe
