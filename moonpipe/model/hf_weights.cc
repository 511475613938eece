#include "moonpipe/model/hf_weights.h"

#include <cstring>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"
#include "moonpipe/model/quantised.h"

namespace moonpipe {
namespace {

constexpr std::pair<StoredType, torch::Dtype> kTypes[] = {
    {StoredType::kF32, torch::kFloat},  {StoredType::kBF16, torch::kBFloat16},       {StoredType::kF16, torch::kHalf},
    {StoredType::kF64, torch::kDouble}, {StoredType::kI64, torch::kLong},            {StoredType::kI32, torch::kInt},
    {StoredType::kU8, torch::kByte},    {StoredType::kI8, torch::kChar},             {StoredType::kBool, torch::kBool},
    {StoredType::kF8E4M3, torch::kFloat8_e4m3fn},
};

// Quantised rows are decoded so many values at a time where they cannot be written in place.
constexpr int64_t kDecodedValues = 1 << 20;

// Wraps the mapped bytes without a copy; valid while the file is open.
torch::Tensor View(const void* data, const std::vector<int64_t>& shape, torch::Dtype dtype) {
  return torch::from_blob(const_cast<void*>(data), shape, torch::dtype(dtype));
}

std::string BytesOf(const StoredTensor& stored) { return std::string(static_cast<const char*>(stored.data), stored.num_bytes()); }

// Row numbers in the stored tensor of the piece's rows, in their order.
torch::Tensor StoredRows(const StoredWeight& weight, int64_t rows) {
  torch::Tensor index = torch::empty({rows}, torch::kLong);
  for (int64_t row = 0; row < rows; ++row) index.data_ptr<int64_t>()[row] = StoredRowOf(weight, row);
  return index;
}

// The rows of a canonical tensor that a piece names, as a matrix.
torch::Tensor RowsOf(const ParameterStore& store, const WeightPiece& piece) {
  const torch::Tensor value = store.PublishedValue(piece.tensor);
  return value.view({value.size(0), -1}).narrow(0, piece.tensor_row, piece.rows);
}

Int4View ViewInt4(const StoredWeight& weight, const Quantization& quantization, const void* packed, const void* scale, StoredType scale_type) {
  Int4View view;
  view.packed = static_cast<const char*>(packed);
  view.scale = static_cast<const char*>(scale);
  view.scale_type = scale_type;
  view.columns = weight.columns();
  view.group_size = quantization.group_size;
  return view;
}

Fp8View ViewFp8(const StoredWeight& weight, const Quantization& quantization, const void* bytes, const void* scale, StoredType scale_type) {
  Fp8View view;
  view.bytes = static_cast<const char*>(bytes);
  view.scale = static_cast<const char*>(scale);
  view.scale_type = scale_type;
  view.columns = weight.columns();
  view.block_rows = quantization.block_rows;
  view.block_columns = quantization.block_columns;
  return view;
}

// Reads stored tensors into a store and notes how to write them.
class Loader {
 public:
  Loader(const ModelFolder& files, ParameterStore& store, const LoadOptions& options) : files_(files), store_(store), options_(options) {
    if (store.config().quantization.has_value()) form_.quantization = *store.config().quantization;
    for (const TensorSpec& spec : store.specs()) owned_.insert(spec.name);
  }

  absl::Status Load(StoredWeight weight) {
    if (owned_.count(weight.pieces.front().tensor) == 0) return absl::OkStatus();
    if (weight.is_tied_head) return LoadTiedHead(std::move(weight));
    switch (weight.encoding) {
      case WeightEncoding::kPlain:
        MOONPIPE_RETURN_IF_ERROR(LoadPlain(weight));
        break;
      case WeightEncoding::kInt4:
        MOONPIPE_RETURN_IF_ERROR(LoadInt4(weight));
        break;
      case WeightEncoding::kFp8:
        MOONPIPE_RETURN_IF_ERROR(LoadFp8(weight));
        break;
    }
    if (!options_.keep_quantised) weight.encoding = WeightEncoding::kPlain;
    if (weight.type != StoredType::kF32) {
      for (const WeightPiece& piece : weight.pieces) form_.MarkRounded(piece.tensor);
    }
    const bool embedding_copy = store_.tied_head().defined() && !store_.range().has_embedding &&
                                weight.pieces.front().tensor == store_.decoder_prefix() + "embed_tokens.weight";
    if (!embedding_copy) form_.layout.push_back(std::move(weight));
    return absl::OkStatus();
  }

  WeightForm Release() { return std::move(form_); }

 private:
  absl::Status LoadPlain(const StoredWeight& weight) {
    MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* stored, files_.Find(weight.name));
    MOONPIPE_ASSIGN_OR_RETURN(const torch::Dtype dtype, ToTorchType(stored->type));
    const torch::Tensor matrix = View(stored->data, {weight.matrix_rows(), weight.columns()}, dtype);
    for (const WeightPiece& piece : weight.pieces) {
      torch::Tensor rows = matrix.narrow(0, piece.stored_row, piece.rows);
      if (weight.half_split_head > 0) rows = rows.index_select(0, StoredRows(weight, piece.rows));
      RowsOf(store_, piece).copy_(rows);
    }
    return absl::OkStatus();
  }

  // `decode` writes one stored row to floats.
  template <typename Decode>
  void LoadRows(const StoredWeight& weight, Decode decode) {
    const int64_t columns = weight.columns();
    for (const WeightPiece& piece : weight.pieces) {
      torch::Tensor into = RowsOf(store_, piece);
      const bool in_place = into.is_cpu() && into.scalar_type() == torch::kFloat;
      const int64_t step = in_place ? piece.rows : std::clamp<int64_t>(kDecodedValues / columns, 1, piece.rows);
      for (int64_t begin = 0; begin < piece.rows; begin += step) {
        const int64_t rows = std::min(step, piece.rows - begin);
        const torch::Tensor decoded = in_place ? into : torch::empty({rows, columns}, torch::kFloat);
        float* out = decoded.data_ptr<float>();
        for (int64_t row = 0; row < rows; ++row) decode(piece.stored_row + StoredRowOf(weight, begin + row), out + row * columns);
        if (!in_place) into.narrow(0, begin, rows).copy_(decoded);
      }
    }
  }

  absl::Status LoadInt4(const StoredWeight& weight) {
    MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* packed, files_.Find(weight.name + "_packed"));
    MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* scale, files_.Find(weight.name + "_scale"));
    MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* shape, files_.Find(weight.name + "_shape"));
    const Int4View view = ViewInt4(weight, form_.quantization, packed->data, scale->data, scale->type);
    LoadRows(weight, [&](int64_t row, float* out) { DecodeInt4Row(view, row, out); });
    if (options_.keep_quantised) form_.scales[weight.name] = {scale->type, scale->shape, BytesOf(*scale), shape->type};
    return absl::OkStatus();
  }

  absl::Status LoadFp8(const StoredWeight& weight) {
    MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* bytes, files_.Find(weight.name));
    MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* scale, files_.Find(weight.name + "_scale_inv"));
    const Fp8View view = ViewFp8(weight, form_.quantization, bytes->data, scale->data, scale->type);
    LoadRows(weight, [&](int64_t row, float* out) { DecodeFp8Row(view, row, out); });
    if (options_.keep_quantised) form_.scales[weight.name] = {scale->type, scale->shape, BytesOf(*scale), StoredType::kI32};
    return absl::OkStatus();
  }

  // The embedding is read under its own name; the second copy must be the same, or one of the two would be lost.
  absl::Status LoadTiedHead(StoredWeight weight) {
    if (!store_.range().has_head) return absl::OkStatus();
    MOONPIPE_ASSIGN_OR_RETURN(const StoredTensor* stored, files_.Find(weight.name));
    MOONPIPE_ASSIGN_OR_RETURN(const torch::Dtype dtype, ToTorchType(stored->type));
    const torch::Tensor embedding = store_.PublishedValue(weight.pieces.front().tensor);
    if (!torch::equal(View(stored->data, stored->shape, dtype).to(embedding.scalar_type()), embedding.cpu())) {
      return absl::InvalidArgumentError(absl::StrCat(weight.name, " in ", files_.FileOf(weight.name), " differs from ", weight.pieces.front().tensor,
                                                     ", but tie_word_embeddings is true: set it to false or remove ", weight.name));
    }
    form_.layout.push_back(std::move(weight));
    return absl::OkStatus();
  }

  const ModelFolder& files_;
  ParameterStore& store_;
  const LoadOptions options_;
  std::set<std::string> owned_;
  WeightForm form_;
};

// One tensor of the file that a save writes, and what it is made of.
struct FileTensor {
  enum class Kind { kValues, kPacked, kScale, kShape };
  const StoredWeight* weight = nullptr;
  Kind kind = Kind::kValues;
};

// Makes the bytes of file tensors, one at a time.
class Writer {
 public:
  Writer(const ParameterStore& store, const WeightForm& form) : store_(store), form_(form) {
    using Kind = FileTensor::Kind;
    for (const StoredWeight& weight : form.layout) {
      switch (weight.encoding) {
        case WeightEncoding::kPlain:
          Add(weight, Kind::kValues, weight.name, weight.type, weight.shape);
          break;
        case WeightEncoding::kInt4: {
          const KeptScales& scales = form.scales.at(weight.name);
          Add(weight, Kind::kPacked, weight.name + "_packed", StoredType::kI32, {weight.shape[0], (weight.shape[1] + 7) / 8});
          Add(weight, Kind::kScale, weight.name + "_scale", scales.type, scales.shape);
          Add(weight, Kind::kShape, weight.name + "_shape", scales.shape_type, {2});
          break;
        }
        case WeightEncoding::kFp8: {
          const KeptScales& scales = form.scales.at(weight.name);
          Add(weight, Kind::kPacked, weight.name, StoredType::kF8E4M3, weight.shape);
          Add(weight, Kind::kScale, weight.name + "_scale_inv", scales.type, scales.shape);
          break;
        }
      }
    }
  }

  const std::vector<StoredTensor>& tensors() const { return tensors_; }

  absl::StatusOr<const void*> Bytes(const StoredTensor& tensor) {
    const FileTensor& made = made_of_.at(tensor.name);
    const StoredWeight& weight = *made.weight;
    switch (made.kind) {
      case FileTensor::Kind::kValues: {
        MOONPIPE_ASSIGN_OR_RETURN(const torch::Dtype dtype, ToTorchType(tensor.type));
        held_ = Values(weight, dtype);
        return held_.const_data_ptr();
      }
      case FileTensor::Kind::kPacked: {
        const torch::Tensor values = Values(weight, torch::kFloat);
        const KeptScales& scales = form_.scales.at(weight.name);
        held_ = torch::empty({static_cast<int64_t>(tensor.num_bytes())}, torch::kByte);
        auto* bytes = held_.data_ptr<uint8_t>();
        const int64_t stride = held_.numel() / weight.shape[0];
        for (int64_t row = 0; row < weight.shape[0]; ++row) {
          const float* from = values.const_data_ptr<float>() + row * weight.columns();
          if (weight.encoding == WeightEncoding::kInt4) {
            EncodeInt4Row(ViewInt4(weight, form_.quantization, nullptr, scales.bytes.data(), scales.type), row, from,
                          reinterpret_cast<uint32_t*>(bytes + row * stride));
          } else {
            EncodeFp8Row(ViewFp8(weight, form_.quantization, nullptr, scales.bytes.data(), scales.type), row, from, bytes + row * stride);
          }
        }
        return held_.const_data_ptr();
      }
      case FileTensor::Kind::kScale:
        return form_.scales.at(weight.name).bytes.data();
      case FileTensor::Kind::kShape: {
        MOONPIPE_ASSIGN_OR_RETURN(const torch::Dtype dtype, ToTorchType(tensor.type));
        held_ = torch::tensor(weight.shape, torch::kLong).to(dtype);
        return held_.const_data_ptr();
      }
    }
    return absl::InternalError("unknown kind of tensor");
  }

 private:
  void Add(const StoredWeight& weight, FileTensor::Kind kind, const std::string& name, StoredType type, const std::vector<int64_t>& shape) {
    tensors_.push_back({name, type, shape, nullptr});
    made_of_[name] = {&weight, kind};
  }

  // The stored matrix in host memory; the parameter itself where it is one.
  torch::Tensor Values(const StoredWeight& weight, torch::Dtype dtype) const {
    const WeightPiece& first = weight.pieces.front();
    if (weight.pieces.size() == 1 && weight.half_split_head == 0) return RowsOf(store_, first).to(torch::kCPU).to(dtype).contiguous();
    torch::Tensor matrix = torch::empty({weight.matrix_rows(), weight.columns()}, dtype);
    for (const WeightPiece& piece : weight.pieces) {
      torch::Tensor into = matrix.narrow(0, piece.stored_row, piece.rows);
      const torch::Tensor rows = RowsOf(store_, piece);
      if (weight.half_split_head == 0) {
        into.copy_(rows);
      } else {
        into.index_copy_(0, StoredRows(weight, piece.rows), rows.to(torch::kCPU).to(dtype));
      }
    }
    return matrix;
  }

  const ParameterStore& store_;
  const WeightForm& form_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, FileTensor> made_of_;
  torch::Tensor held_;  // what Bytes gave out
};

}  // namespace

absl::StatusOr<torch::Dtype> ToTorchType(StoredType type) {
  for (const auto& [stored, dtype] : kTypes) {
    if (stored == type) return dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat("no torch dtype for ", StoredTypeName(type)));
}

absl::StatusOr<StoredType> ToStoredType(torch::Dtype dtype) {
  for (const auto& [stored, known] : kTypes) {
    if (known == dtype) return stored;
  }
  return absl::InvalidArgumentError(absl::StrCat("safetensors files do not hold ", c10::toString(dtype)));
}

absl::StatusOr<torch::Tensor> ToTorch(const StoredTensor& stored) {
  MOONPIPE_ASSIGN_OR_RETURN(const torch::Dtype dtype, ToTorchType(stored.type));
  return View(stored.data, stored.shape, dtype).clone();
}

WeightForm FreshForm(const ParameterStore& store) {
  std::vector<TensorSpec> specs;
  for (const TensorSpec& spec : store.specs()) {
    const bool embedding_copy = store.tied_head().defined() && !store.range().has_embedding &&
                                spec.name == store.decoder_prefix() + "embed_tokens.weight";
    if (!embedding_copy) specs.push_back(spec);
  }
  WeightForm form;
  form.layout = PublishedLayout(specs);
  return form;
}

absl::StatusOr<WeightForm> LoadModelFolder(const std::string& folder, ParameterStore& store, const LoadOptions& options) {
  MOONPIPE_ASSIGN_OR_RETURN(const ModelFolder files, ModelFolder::Open(folder));
  MOONPIPE_ASSIGN_OR_RETURN(WeightLayout layout, DetectLayout(store.config(), files));
  const torch::NoGradGuard no_grad;
  Loader loader(files, store, options);
  for (StoredWeight& weight : layout) MOONPIPE_RETURN_IF_ERROR(loader.Load(std::move(weight)));
  return loader.Release();
}

absl::StatusOr<WrittenWeights> WriteWeights(const std::string& path, const ParameterStore& store, const WeightForm& form,
                                            const std::map<std::string, std::string>& metadata) {
  const torch::NoGradGuard no_grad;
  Writer writer(store, form);
  WrittenWeights written;
  for (const StoredTensor& tensor : writer.tensors()) {
    written.names.push_back(tensor.name);
    written.tensor_bytes += tensor.num_bytes();
  }
  MOONPIPE_ASSIGN_OR_RETURN(written.file_bytes, WriteSafetensors(path, writer.tensors(), metadata,
                                                                 [&](const StoredTensor& tensor) { return writer.Bytes(tensor); }));
  return written;
}

absl::StatusOr<uint64_t> WriteTensorFile(const std::string& path, const std::vector<std::pair<std::string, torch::Tensor>>& tensors,
                                         const std::map<std::string, std::string>& metadata) {
  std::vector<torch::Tensor> held;
  std::vector<StoredTensor> stored;
  for (const auto& [name, tensor] : tensors) {
    MOONPIPE_ASSIGN_OR_RETURN(const StoredType type, ToStoredType(tensor.scalar_type()));
    held.push_back(tensor.detach().to(torch::kCPU).contiguous());
    stored.push_back({name, type, tensor.sizes().vec(), held.back().data_ptr()});
  }
  return WriteSafetensors(path, stored, metadata);
}

}  // namespace moonpipe
