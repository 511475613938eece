#include "moonpipe/data/batch_layout.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

constexpr int64_t kMaskedPosition = 1;

// The given row with every token repeated as often as the expansion says.
struct Token {
  int64_t column = 0;
  int64_t id = 0;
  int64_t document = 0;  // 0: masked
  int64_t label = 0;
  int64_t feature = -1;  // row of the features, from the first of the row's pictures
};

class RowReader {
 public:
  RowReader(const BatchInputs& inputs, int64_t row) : inputs_(inputs), row_(row) {}

  int64_t Id(int64_t column) const { return At(inputs_.input_ids, column, 0); }
  int64_t Mask(int64_t column) const { return At(inputs_.attention_mask, column, 1); }
  bool IsMedia(int64_t column) const {
    return inputs_.media_token >= 0 && !inputs_.input_ids.empty() && Id(column) == inputs_.media_token;
  }
  int64_t Label(int64_t column) const {
    if (IsMedia(column)) return inputs_.ignore_index;
    if (!inputs_.labels.empty()) return At(inputs_.labels, column, 0);
    return inputs_.input_ids.empty() ? inputs_.ignore_index : Id(column);
  }
  int64_t Position(int64_t column) const { return At(inputs_.position_ids, column, 0); }

 private:
  int64_t At(absl::Span<const int64_t> values, int64_t column, int64_t absent) const {
    return values.empty() ? absent : values[static_cast<size_t>(row_ * inputs_.columns + column)];
  }

  const BatchInputs& inputs_;
  const int64_t row_;
};

absl::Status CheckSizes(const BatchInputs& inputs) {
  const auto check = [&](absl::Span<const int64_t> values, const char* name) {
    const auto size = static_cast<int64_t>(values.size());
    if (values.empty() || size == inputs.rows * inputs.columns) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(name, " has ", size, " entries, the batch has ", inputs.rows, " x ", inputs.columns));
  };
  if (inputs.rows < 1 || inputs.columns < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a batch of ", inputs.rows, " x ", inputs.columns, " has no token"));
  }
  MOONPIPE_RETURN_IF_ERROR(check(inputs.input_ids, "input_ids"));
  MOONPIPE_RETURN_IF_ERROR(check(inputs.attention_mask, "attention_mask"));
  MOONPIPE_RETURN_IF_ERROR(check(inputs.position_ids, "position_ids"));
  return check(inputs.labels, "labels");
}

// Whether each placeholder stands for a whole picture.
absl::StatusOr<bool> IsCompact(const BatchInputs& inputs) {
  const auto placeholders = inputs.media_token < 0 ? 0 : std::count(inputs.input_ids.begin(), inputs.input_ids.end(), inputs.media_token);
  const int64_t rows = std::accumulate(inputs.feature_rows.begin(), inputs.feature_rows.end(), int64_t{0});
  const auto pictures = static_cast<int64_t>(inputs.feature_rows.size());
  if (inputs.pictures_without_place) {
    if (placeholders == 0) return false;
    return absl::InvalidArgumentError(absl::StrCat("pictures that no token sees come with ", placeholders, " placeholders, 0 were expected"));
  }
  if (placeholders == rows) return false;
  if (placeholders == pictures) return true;
  return absl::InvalidArgumentError(absl::StrCat("the batch has ", placeholders, " media placeholders, but its ", pictures,
                                                 " pictures have ", rows, " feature rows: it needs one placeholder a feature row or one a picture"));
}

// Cuts a row's tokens into documents.
absl::Status AssignDocuments(const BatchInputs& inputs, const RowReader& row, int64_t number, std::vector<int64_t>& documents) {
  std::set<int64_t> ended;
  int64_t last_mask = 0, last_position = -1, document = 0;
  documents.assign(static_cast<size_t>(inputs.columns), 0);
  for (int64_t column = 0; column < inputs.columns; ++column) {
    const int64_t mask = row.Mask(column);
    if (mask < 0) return absl::InvalidArgumentError(absl::StrCat("row ", number, ": attention_mask at token ", column, " is ", mask, ", below 0"));
    if (mask == 0) continue;
    // Positions that begin anew begin a document too: that is how some batches with a binary mask tell their documents.
    const bool anew = !inputs.position_ids.empty() && document > 0 && row.Position(column) == 0;
    const bool first = mask != last_mask || anew;
    if (mask != last_mask) {
      if (ended.contains(mask)) {
        return absl::InvalidArgumentError(absl::StrCat("row ", number, ": document ", mask, " of attention_mask comes back at token ", column,
                                                       " after document ", last_mask, "; the tokens of a document must follow each other"));
      }
      ended.insert(last_mask);
      last_mask = mask;
    }
    if (first) ++document;
    if (!inputs.position_ids.empty()) {
      const int64_t position = row.Position(column);
      if (!first && position != last_position + 1) {
        return absl::InvalidArgumentError(absl::StrCat("row ", number, ": position_ids at token ", column, " is ", position, " after ",
                                                       last_position, "; positions of a document must be consecutive"));
      }
      last_position = position;
    }
    documents[static_cast<size_t>(column)] = document;
  }
  return absl::OkStatus();
}

void AddMasked(uint32_t feature, std::vector<data::v1::RowSpan>& spans) {
  if (!spans.empty() && spans.back().end() == feature) {
    spans.back().set_end(feature + 1);
    return;
  }
  data::v1::RowSpan& span = spans.emplace_back();
  span.set_begin(feature);
  span.set_end(feature + 1);
}

// The tokens of a row after expansion. `picture` is the next one and moves on.
absl::StatusOr<std::vector<Token>> ExpandRow(const BatchInputs& inputs, int64_t number, bool compact, size_t& picture) {
  const RowReader row(inputs, number);
  std::vector<int64_t> documents;
  MOONPIPE_RETURN_IF_ERROR(AssignDocuments(inputs, row, number, documents));
  std::vector<Token> tokens;
  int64_t feature = 0;
  int64_t left = 0;  // feature rows of the current picture that have no placeholder yet
  for (int64_t column = 0; column < inputs.columns; ++column) {
    Token token{column, row.Id(column), documents[static_cast<size_t>(column)], row.Label(column), -1};
    if (!row.IsMedia(column)) {
      if (left > 0) break;
      tokens.push_back(token);
      continue;
    }
    const auto next = [&]() -> absl::StatusOr<int64_t> {
      if (picture < inputs.feature_rows.size()) return inputs.feature_rows[picture++];
      return absl::InvalidArgumentError(absl::StrCat("row ", number, ": token ", column, " is a placeholder, but all ",
                                                     inputs.feature_rows.size(), " pictures have their places"));
    };
    int64_t repeat = 1;
    if (compact) {
      MOONPIPE_ASSIGN_OR_RETURN(repeat, next());
    } else {
      if (left == 0) {
        MOONPIPE_ASSIGN_OR_RETURN(left, next());
      }
      --left;
    }
    for (int64_t i = 0; i < repeat; ++i) {
      token.feature = feature++;
      tokens.push_back(token);
    }
  }
  if (left > 0) {
    const int64_t rows = inputs.feature_rows[picture - 1];
    return absl::InvalidArgumentError(absl::StrCat("row ", number, ": picture ", picture - 1, " has ", rows,
                                                   " feature rows, but its run of placeholders has ", rows - left));
  }
  return tokens;
}

RowLayout PackRow(const BatchInputs& inputs, const std::vector<Token>& tokens, int64_t columns) {
  RowLayout layout;
  // Padded on the left: the row keeps its right end.
  const bool left_padded = !tokens.empty() && tokens.front().document == 0 && tokens.back().document != 0;
  const int64_t shift = left_padded ? columns - static_cast<int64_t>(tokens.size()) : 0;
  layout.positions.assign(static_cast<size_t>(columns), kMaskedPosition);
  int64_t document = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Token& token = tokens[i];
    if (token.document == 0) {
      if (token.feature >= 0) AddMasked(static_cast<uint32_t>(token.feature), layout.masked_features);
      continue;
    }
    if (token.document != document) {
      document = token.document;
      layout.document_lengths.push_back(0);
    }
    const int64_t place = shift + static_cast<int64_t>(i);
    layout.positions[static_cast<size_t>(place)] = layout.document_lengths.back()++;
    layout.places.push_back(place);
    layout.columns.push_back(token.column);
    if (!inputs.input_ids.empty()) layout.token_ids.push_back(static_cast<int32_t>(token.id));
    layout.labels.push_back(static_cast<int32_t>(token.label));
  }
  return layout;
}

}  // namespace

absl::StatusOr<BatchLayout> LayOutBatch(const BatchInputs& inputs) {
  MOONPIPE_RETURN_IF_ERROR(CheckSizes(inputs));
  MOONPIPE_ASSIGN_OR_RETURN(const bool compact, IsCompact(inputs));
  BatchLayout layout;
  std::vector<std::vector<Token>> rows;
  std::vector<size_t> pictures = {0};
  size_t picture = 0;
  for (int64_t row = 0; row < inputs.rows; ++row) {
    MOONPIPE_ASSIGN_OR_RETURN(std::vector<Token> tokens, ExpandRow(inputs, row, compact, picture));
    layout.columns = std::max(layout.columns, static_cast<int64_t>(tokens.size()));
    rows.push_back(std::move(tokens));
    pictures.push_back(picture);
  }
  for (size_t row = 0; row < rows.size(); ++row) {
    RowLayout& packed = layout.rows.emplace_back(PackRow(inputs, rows[row], layout.columns));
    packed.first_picture = pictures[row];
    packed.end_picture = pictures[row + 1];
  }
  if (inputs.pictures_without_place) {
    // The first row carries them.
    for (size_t row = 0; row < rows.size(); ++row) {
      layout.rows[row].first_picture = row == 0 ? 0 : inputs.feature_rows.size();
      layout.rows[row].end_picture = inputs.feature_rows.size();
    }
    const int64_t total = std::accumulate(inputs.feature_rows.begin(), inputs.feature_rows.end(), int64_t{0});
    for (int64_t feature = 0; feature < total; ++feature) AddMasked(static_cast<uint32_t>(feature), layout.rows[0].masked_features);
  }
  return layout;
}

uint32_t CountTrainedLabels(absl::Span<const int32_t> labels, absl::Span<const uint32_t> document_lengths, int64_t ignore_index) {
  uint32_t trained = 0;
  size_t begin = 0;
  for (const uint32_t length : document_lengths) {
    for (size_t i = begin + 1; i < begin + length; ++i) trained += labels[i] != ignore_index;
    begin += length;
  }
  return trained;
}

}  // namespace moonpipe
