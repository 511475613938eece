#include "moonpipe/data/step_source.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/keyed_permutation.h"
#include "moonpipe/data/microbatch.h"
#include "moonpipe/data/packer.h"
#include "moonpipe/data/picture_warp.h"
#include "moonpipe/data/sample_loader.h"
#include "moonpipe/data/utf8.h"

namespace moonpipe {
namespace {

// One window of an epoch's order after packing. It depends on nothing but the data set, the options and its place.
struct PackedWindow {
  uint64_t epoch = 0;
  uint64_t window = 0;
  std::vector<std::vector<uint64_t>> packs;  // global sample indices
  std::vector<data::v1::SkippedSample> skipped;
};

class PackedStepSource : public StepSource {
 public:
  explicit PackedStepSource(std::unique_ptr<SampleLoader> loader) : loader_(std::move(loader)) {}

  uint64_t size() const override { return loader_->reader().size(); }

  absl::StatusOr<Step> Make(uint64_t number, const data::v1::DataCursor& cursor) override {
    MOONPIPE_RETURN_IF_ERROR(CheckCursor(cursor));
    Step step;
    step.manifest.set_step(number);
    data::v1::DataCursor place = cursor;
    std::vector<std::string> patches_digests;
    EmptyEpoch empty;
    while (step.microbatches.size() < static_cast<size_t>(loader_->options().microbatches)) {
      MOONPIPE_RETURN_IF_ERROR(Pack(place));
      if (place.pack() == 0) {
        for (const data::v1::SkippedSample& skipped : packed_->skipped) *step.manifest.add_skipped() = skipped;
        MOONPIPE_RETURN_IF_ERROR(empty.See(*packed_, windows()));
      }
      if (place.pack() < packed_->packs.size()) {
        MOONPIPE_ASSIGN_OR_RETURN(std::string digest, Append(packed_->packs[place.pack()], step));
        patches_digests.push_back(std::move(digest));
        place.set_pack(place.pack() + 1);
      } else if (place.pack() > packed_->packs.size()) {
        return absl::InvalidArgumentError(absl::StrCat("the cursor stands at pack ", place.pack(), " of window ", place.window(), " of epoch ",
                                                       place.epoch(), ", which has ", packed_->packs.size(),
                                                       ": it was made from another data set or other options"));
      }
      if (place.pack() == packed_->packs.size()) Advance(place);
    }
    *step.manifest.mutable_next_cursor() = place;
    step.manifest.set_digest(StepDigest(step, patches_digests));
    return step;
  }

 private:
  // Watches for an epoch without any usable sample, over which Make would never end.
  struct EmptyEpoch {
    uint64_t windows_seen = 0;
    std::map<std::string, uint64_t> reasons;
    std::string example;

    absl::Status See(const PackedWindow& window, uint64_t windows) {
      if (window.window == 0) *this = {};
      if (!window.packs.empty()) windows_seen = windows + 1;
      ++windows_seen;
      for (const data::v1::SkippedSample& skipped : window.skipped) {
        ++reasons[skipped.reason()];
        if (example.empty()) example = absl::StrCat("sample ", skipped.sample(), " (", skipped.key(), "): ", skipped.detail());
      }
      if (windows_seen != windows || window.window + 1 != windows) return absl::OkStatus();
      uint64_t total = 0;
      std::vector<std::string> counts;
      for (const auto& [reason, count] : reasons) {
        total += count;
        counts.push_back(absl::StrCat(count, " ", reason));
      }
      return absl::InvalidArgumentError(absl::StrCat("none of the ", total, " samples can be used: ", absl::StrJoin(counts, ", "),
                                                     "; for one, ", example));
    }
  };

  uint64_t window_size() const { return static_cast<uint64_t>(loader_->options().packing_window); }
  uint64_t windows() const { return (size() + window_size() - 1) / window_size(); }

  absl::Status CheckCursor(const data::v1::DataCursor& cursor) const {
    if (cursor.window() < windows()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("the cursor stands in window ", cursor.window(), " of an epoch of ", windows(),
                                                   ": it was made from another data set or another packing_window"));
  }

  void Advance(data::v1::DataCursor& place) const {
    place.set_pack(0);
    place.set_window(place.window() + 1);
    if (place.window() < windows()) return;
    place.set_window(0);
    place.set_epoch(place.epoch() + 1);
  }

  // Makes `packed_` the window of `place`.
  absl::Status Pack(const data::v1::DataCursor& place) {
    if (packed_.has_value() && packed_->epoch == place.epoch() && packed_->window == place.window()) return absl::OkStatus();
    PackedWindow result{place.epoch(), place.window(), {}, {}};
    const KeyedPermutation order(size(), loader_->options().seed, place.epoch());
    const uint64_t begin = place.window() * window_size();
    std::vector<uint64_t> usable;
    std::vector<uint32_t> lengths;
    for (uint64_t position = begin; position < std::min(begin + window_size(), size()); ++position) {
      const uint64_t index = order.At(position);
      MOONPIPE_ASSIGN_OR_RETURN(const std::shared_ptr<const PreparedSample> sample, loader_->Prepare(index));
      if (!sample->skip.has_value()) {
        usable.push_back(index);
        lengths.push_back(static_cast<uint32_t>(sample->token_ids.size()));
        continue;
      }
      data::v1::SkippedSample& skipped = result.skipped.emplace_back();
      skipped.set_sample(index);
      skipped.set_key(ReplaceInvalidUtf8(loader_->reader().Key(index)));
      skipped.set_reason(sample->skip->reason);
      skipped.set_detail(ReplaceInvalidUtf8(sample->skip->detail));
    }
    for (const std::vector<size_t>& pack : PackDocuments(lengths, static_cast<uint32_t>(loader_->options().microbatch_tokens))) {
      std::vector<uint64_t>& samples = result.packs.emplace_back();
      for (const size_t document : pack) samples.push_back(usable[document]);
    }
    packed_ = std::move(result);
    return absl::OkStatus();
  }

  // Appends one pack as a microbatch; the digest of its patches.
  absl::StatusOr<std::string> Append(const std::vector<uint64_t>& samples, Step& step) {
    std::vector<std::shared_ptr<const PreparedSample>> held;
    std::deque<PicturePatches> warped;  // grows without moving what documents point to
    std::vector<Document> documents;
    std::string digest;
    for (const uint64_t index : samples) {
      MOONPIPE_ASSIGN_OR_RETURN(std::shared_ptr<const PreparedSample> sample, loader_->Prepare(index));
      if (sample->skip.has_value()) {
        return absl::DataLossError(absl::StrCat("sample ", index, " was usable when its window was packed and no longer is: ",
                                                sample->skip->detail, "; the data files must not change during a run"));
      }
      Document document{index, &sample->token_ids, &sample->labels, {}};
      for (size_t i = 0; i < sample->pictures.size(); ++i) {
        const PictureWarp warp = DrawWarp(loader_->options().seed, packed_->epoch, index, i, loader_->options().random_warp);
        if (warp == PictureWarp()) {
          document.pictures.push_back(&sample->pictures[i]);
          continue;
        }
        warped.push_back(WarpPicture(sample->pictures[i], warp, loader_->options().pictures));
        document.pictures.push_back(&warped.back());
        digest += warp.ToString();
      }
      documents.push_back(std::move(document));
      digest += sample->patches_digest;
      held.push_back(std::move(sample));
    }
    AppendMicrobatch(documents, loader_->options().pictures.merge, loader_->options().ignore_index, step);
    return digest;
  }

  std::unique_ptr<SampleLoader> loader_;
  std::optional<PackedWindow> packed_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StepSource>> OpenStepSource(const StepSourceOptions& options) {
  MOONPIPE_ASSIGN_OR_RETURN(std::unique_ptr<SampleLoader> loader, SampleLoader::Open(options));
  return std::make_unique<PackedStepSource>(std::move(loader));
}

}  // namespace moonpipe
