#include "runtime/loaded_image.h"

#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr size_t kLogBytes = 4096;  // of the driver's PTX compiler

}  // namespace

std::shared_ptr<const LoadedImage> LoadedImage::load(Image image, const std::vector<uint8_t>& bytes,
                                                     const std::string& origin) {
  std::shared_ptr<LoadedImage> module(new LoadedImage(std::move(image), origin));
  // The driver copies the image: the bytes may go after this call.
  check(driver().cuLibraryLoadData(&module->handle_, bytes.data(), nullptr, nullptr, 0, nullptr,
                                   nullptr, 0),
        "driver", "cuLibraryLoadData of " + origin);
  return module;
}

std::shared_ptr<const LoadedImage> LoadedImage::compile(Image image,
                                                        const std::vector<uint8_t>& text,
                                                        const std::string& origin) {
  std::shared_ptr<LoadedImage> module(new LoadedImage(std::move(image), origin));
  module->compiled_ = true;
  std::vector<char> log(kLogBytes, '\0');
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  // The driver takes numbers in place of pointers here.
  void* values[] = {log.data(), reinterpret_cast<void*>(log.size() - 1)};
  const CUresult result = driver().cuLibraryLoadData(&module->handle_, text.data(), options, values,
                                                     2, nullptr, nullptr, 0);
  if (result != CUDA_SUCCESS) {
    const std::string said = printable(log.data(), kLogBytes);
    check(result, "image",
          "cuLibraryLoadData of " + origin +
              " (the compiler says: " + (said.empty() ? "nothing" : said) + ")");
  }
  return module;
}

void LoadedImage::unload() const {
  if (handle_ == nullptr) return;
  check(driver().cuLibraryUnload(handle_), "driver", "cuLibraryUnload of " + origin_);
  handle_ = nullptr;
}

LoadedImage::~LoadedImage() {
  if (handle_ != nullptr) ignore_in_destructor(driver().cuLibraryUnload(handle_));
}

}  // namespace torch_cubin
