#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/file.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/data/microbatch.h"
#include "moonpipe/data/packer.h"
#include "moonpipe/data/sample_loader.h"
#include "moonpipe/data/skip.h"
#include "moonpipe/data/step_source.h"

namespace moonpipe {
namespace {

struct DecodeSample {
  std::vector<int32_t> prompt;
  std::vector<int32_t> swapped_prompt;  // differs where the two pictures have different sizes; empty without two pictures
  std::vector<PicturePatches> pictures;
};

class LoadedDecodeSource : public DecodeSource {
 public:
  explicit LoadedDecodeSource(std::unique_ptr<SampleLoader> loader) : loader_(std::move(loader)) {}

  absl::Status Load() {
    const uint64_t total = loader_->reader().size();
    std::string example;
    for (uint64_t index = 0; index < total; ++index) {
      const absl::Status status = Add(index);
      if (status.ok()) continue;
      const auto reason = SkipReason(status);
      if (!reason.has_value()) return status;
      MP_LOG(WARNING) << "held-out sample " << index << " (" << loader_->reader().Key(index) << ") is left out: " << *reason << ": "
                      << status.message();
      if (example.empty()) example = absl::StrCat("sample ", index, ": ", *reason, ": ", status.message());
    }
    if (!samples_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("none of the ", total, " held-out samples can be used; ", example));
  }

  size_t size() const override { return samples_.size(); }
  const std::vector<std::vector<int32_t>>& references() const override { return references_; }
  const std::vector<std::string>& reference_texts() const override { return reference_texts_; }
  int32_t end_token() const override { return loader_->chat_template().end_of_turn(); }

  std::string Text(const std::vector<int32_t>& answer) const override {
    const auto end = std::find(answer.begin(), answer.end(), end_token());
    return loader_->tokenizer().Decode(absl::MakeConstSpan(answer.data(), static_cast<size_t>(end - answer.begin())));
  }

  absl::StatusOr<Step> Make(const std::vector<std::vector<int32_t>>& answers, const std::vector<bool>& done, bool swap_pictures) override {
    if (answers.size() != size() || done.size() != size()) {
      return absl::InvalidArgumentError(absl::StrCat(answers.size(), " answers and ", done.size(), " marks for ", size(), " samples"));
    }
    const auto limit = static_cast<uint32_t>(loader_->options().microbatch_tokens);
    std::vector<size_t> open;
    std::vector<std::vector<int32_t>> texts;
    std::vector<uint32_t> lengths;
    for (size_t i = 0; i < size(); ++i) {
      if (done[i]) continue;
      const bool swapped = swap_pictures && samples_[i].pictures.size() == 2;
      std::vector<int32_t> text = swapped ? samples_[i].swapped_prompt : samples_[i].prompt;
      text.insert(text.end(), answers[i].begin(), answers[i].end());
      if (text.size() > limit) {
        return absl::InvalidArgumentError(absl::StrCat("held-out sample ", i, " has ", text.size(), " tokens with ", answers[i].size(),
                                                       " of its answer; a microbatch holds ", limit, ": end the answer earlier"));
      }
      open.push_back(i);
      lengths.push_back(static_cast<uint32_t>(text.size()));
      texts.push_back(std::move(text));
    }
    Step step;
    std::vector<std::string> patches_digests;
    for (const std::vector<size_t>& pack : PackDocuments(lengths, limit)) {
      std::vector<std::vector<int32_t>> labels(pack.size());
      std::vector<Document> documents;
      for (size_t d = 0; d < pack.size(); ++d) {
        const size_t sample = open[pack[d]];
        labels[d].assign(lengths[pack[d]], static_cast<int32_t>(loader_->options().ignore_index));
        Document document{sample, &texts[pack[d]], &labels[d], {}};
        for (const PicturePatches& picture : samples_[sample].pictures) document.pictures.push_back(&picture);
        if (swap_pictures && document.pictures.size() == 2) std::swap(document.pictures[0], document.pictures[1]);
        documents.push_back(std::move(document));
      }
      AppendMicrobatch(documents, loader_->options().pictures.merge, loader_->options().ignore_index, step);
      const std::vector<uint8_t>& patches = step.microbatches.back().patches;
      patches_digests.push_back(Sha256Hex(absl::string_view(reinterpret_cast<const char*>(patches.data()), patches.size())));
    }
    step.manifest.set_digest(StepDigest(step, patches_digests));
    return step;
  }

 private:
  absl::Status Add(uint64_t index) {
    MOONPIPE_ASSIGN_OR_RETURN(auto read, loader_->ReadPictures(index));
    const Record& record = read.first;
    const ChatTemplate& chat_template = loader_->chat_template();
    std::vector<uint32_t> positions = loader_->Positions(read.second);
    MOONPIPE_ASSIGN_OR_RETURN(TokenSequence prompt, chat_template.RenderPrompt(record, positions));
    DecodeSample sample{std::move(prompt.ids), {}, std::move(read.second)};
    if (positions.size() == 2) {
      std::swap(positions[0], positions[1]);
      MOONPIPE_ASSIGN_OR_RETURN(TokenSequence swapped, chat_template.RenderPrompt(record, positions));
      sample.swapped_prompt = std::move(swapped.ids);
    }
    const size_t longest = std::max(sample.prompt.size(), sample.swapped_prompt.size());
    if (longest > static_cast<size_t>(loader_->options().microbatch_tokens)) {
      return SkipError(kTooLong, absl::StrCat("a prompt of ", longest, " tokens; a microbatch holds ", loader_->options().microbatch_tokens));
    }
    references_.push_back(chat_template.RenderAnswer(record));
    reference_texts_.push_back(Text(references_.back()));
    samples_.push_back(std::move(sample));
    return absl::OkStatus();
  }

  std::unique_ptr<SampleLoader> loader_;
  std::vector<DecodeSample> samples_;
  std::vector<std::vector<int32_t>> references_;
  std::vector<std::string> reference_texts_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DecodeSource>> OpenDecodeSource(const StepSourceOptions& options) {
  MOONPIPE_ASSIGN_OR_RETURN(std::unique_ptr<SampleLoader> loader, SampleLoader::Open(options));
  auto source = std::make_unique<LoadedDecodeSource>(std::move(loader));
  MOONPIPE_RETURN_IF_ERROR(source->Load());
  return source;
}

}  // namespace moonpipe
