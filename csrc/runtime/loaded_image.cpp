#include "runtime/loaded_image.h"

#include <cstdlib>

#include "cubin/error.h"
#include "runtime/device_memory.h"

namespace torch_cubin {
namespace {

constexpr size_t kLogBytes = 4096;  // of the driver's PTX compiler

// The errors that drivers return for an image that they cannot read.
bool is_about_the_image(CUresult result) {
  return result == CUDA_ERROR_INVALID_IMAGE || result == CUDA_ERROR_NO_BINARY_FOR_GPU ||
         result == CUDA_ERROR_INVALID_PTX || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION ||
         result == CUDA_ERROR_INVALID_SOURCE;
}

// A toolkit's "13.0" in the driver's numbering, 13000; 0 if the file does not record it.
int version_number(const std::string& toolkit) {
  char* end = nullptr;
  const long major = std::strtol(toolkit.c_str(), &end, 10);
  if (*end != '.') return 0;
  const long minor = std::strtol(end + 1, nullptr, 10);
  if (major < 0 || major > 1000 || minor < 0 || minor > 99) return 0;
  return static_cast<int>(1000 * major + 10 * minor);
}

void check_load(CUresult result, const LoadedImage& loaded) {
  const std::string& toolkit = loaded.image().toolkit;
  if (is_about_the_image(result) && version_number(toolkit) > driver().version) {
    fail({"driver", loaded.origin(), "is newer than the CUDA driver",
          "a driver for CUDA " + toolkit + " or newer",
          "one for CUDA " + driver_version_text() + ", which says " + describe(result),
          "Install a newer NVIDIA driver, or build the image with an older toolkit."});
  }
  check(result, "driver", "cuLibraryLoadData of " + loaded.origin());
}

}  // namespace

std::shared_ptr<const LoadedImage> LoadedImage::load(Image image, const std::vector<uint8_t>& bytes,
                                                     const std::string& origin, int device_index) {
  std::shared_ptr<LoadedImage> module(new LoadedImage(std::move(image), origin));
  // The driver copies the image: the bytes may be freed after this call.
  const CUresult result = with_device_memory(device_index, [&] {
    return driver().cuLibraryLoadData(&module->handle_, bytes.data(), nullptr, nullptr, 0, nullptr,
                                      nullptr, 0);
  });
  if (result != CUDA_SUCCESS) check_load(result, *module);
  return module;
}

std::shared_ptr<const LoadedImage> LoadedImage::compile(Image image,
                                                        const std::vector<uint8_t>& text,
                                                        const std::string& origin,
                                                        int device_index) {
  std::shared_ptr<LoadedImage> module(new LoadedImage(std::move(image), origin));
  module->compiled_ = true;
  std::vector<char> log(kLogBytes, '\0');
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  // The driver expects integers cast to pointers for some options.
  void* values[] = {log.data(), reinterpret_cast<void*>(log.size() - 1)};
  const CUresult result = with_device_memory(device_index, [&] {
    return driver().cuLibraryLoadData(&module->handle_, text.data(), options, values, 2, nullptr,
                                      nullptr, 0);
  });
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
