#include "moonpipe/data/png_decoder.h"

#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

// libpng reports errors by longjmp, which must not pass over a frame that has something to destroy. So everything with a
// destructor lives in this class, and the functions that libpng can jump out of hold plain values only.
class PngReader {
 public:
  explicit PngReader(absl::string_view bytes) : rest_(bytes) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, &PngReader::OnError, &PngReader::OnWarning);
    info_ = png_create_info_struct(png_);
  }
  ~PngReader() { png_destroy_read_struct(&png_, &info_, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  bool ReadHeader() {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_read_fn(png_, this, &PngReader::OnRead);
    png_set_user_limits(png_, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
    png_set_chunk_malloc_max(png_, 8 << 20);
    png_set_chunk_cache_max(png_, 128);
    png_read_info(png_, info_);
    return true;
  }

  int64_t width() const { return png_get_image_width(png_, info_); }
  int64_t height() const { return png_get_image_height(png_, info_); }

  // Such a picture keeps its 16 bits, big-endian; all others become RGB of 8 bits.
  bool is_wide_grey() const {
    return png_get_color_type(png_, info_) == PNG_COLOR_TYPE_GRAY && png_get_bit_depth(png_, info_) == 16;
  }

  // By an alpha channel, or by a palette's or one colour's.
  bool is_transparent() const {
    return (png_get_color_type(png_, info_) & PNG_COLOR_MASK_ALPHA) != 0 || png_get_valid(png_, info_, PNG_INFO_tRNS) != 0;
  }

  // `rows` points to height() rows of width() x `pixel_bytes` bytes: 2 for a wide grey picture, 4 with alpha, else 3.
  bool ReadPixels(png_bytep* rows, size_t pixel_bytes) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    if (!is_wide_grey()) {
      png_set_palette_to_rgb(png_);
      png_set_expand_gray_1_2_4_to_8(png_);
      png_set_strip_16(png_);
      if (pixel_bytes == 4) {
        png_set_tRNS_to_alpha(png_);
      } else {
        png_set_strip_alpha(png_);
      }
      png_set_gray_to_rgb(png_);
    }
    png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    if (png_get_rowbytes(png_, info_) != static_cast<size_t>(width()) * pixel_bytes) png_error(png_, "unexpected row length");
    png_read_image(png_, rows);
    png_read_end(png_, nullptr);
    return true;
  }

  const std::string& error() const { return error_; }

 private:
  static void OnRead(png_structp png, png_bytep out, size_t size) {
    auto* self = static_cast<PngReader*>(png_get_io_ptr(png));
    if (self->rest_.size() < size) png_error(png, "the file ends too early");
    std::memcpy(out, self->rest_.data(), size);
    self->rest_.remove_prefix(size);
  }
  static void OnError(png_structp png, png_const_charp message) {
    static_cast<PngReader*>(png_get_error_ptr(png))->error_ = message;
    png_longjmp(png, 1);
  }
  static void OnWarning(png_structp, png_const_charp) {}

  absl::string_view rest_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  std::string error_;
};

}  // namespace

absl::StatusOr<RgbImage> DecodePng(absl::string_view bytes, int64_t most_pixels, std::vector<uint8_t>* alpha) {
  if (alpha != nullptr) alpha->clear();
  PngReader reader(bytes);
  if (!reader.ReadHeader()) return absl::InvalidArgumentError(absl::StrCat("damaged PNG: ", reader.error()));
  const int64_t width = reader.width(), height = reader.height();
  if (width > most_pixels / height) {
    return absl::InvalidArgumentError(absl::StrCat("PNG of ", width, "x", height, " pixels; the limit is ", most_pixels, " pixels"));
  }
  const size_t pixels = static_cast<size_t>(width * height);
  const size_t pixel_bytes = reader.is_wide_grey() ? 2 : alpha != nullptr && reader.is_transparent() ? 4 : 3;
  RgbImage image{static_cast<int32_t>(width), static_cast<int32_t>(height), std::vector<uint8_t>(pixels * pixel_bytes)};
  std::vector<png_bytep> rows(height);
  for (size_t y = 0; y < rows.size(); ++y) rows[y] = image.pixels.data() + y * static_cast<size_t>(width) * pixel_bytes;
  if (!reader.ReadPixels(rows.data(), pixel_bytes)) return absl::InvalidArgumentError(absl::StrCat("damaged PNG: ", reader.error()));
  if (pixel_bytes == 2) {
    std::vector<uint8_t> clipped(pixels * 3);
    for (size_t i = 0; i < pixels; ++i) {
      const uint8_t value = image.pixels[2 * i] > 0 ? 255 : image.pixels[2 * i + 1];
      std::fill_n(clipped.begin() + static_cast<ptrdiff_t>(i * 3), 3, value);
    }
    image.pixels = std::move(clipped);
  }
  if (pixel_bytes == 4) {
    alpha->resize(pixels);
    for (size_t i = 0; i < pixels; ++i) {
      (*alpha)[i] = image.pixels[4 * i + 3];
      std::memmove(image.pixels.data() + 3 * i, image.pixels.data() + 4 * i, 3);
    }
    image.pixels.resize(pixels * 3);
  }
  return image;
}

}  // namespace moonpipe
