// LoadedImage: an Image loaded by the driver. One driver handle serves all devices.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cubin/image.h"
#include "driver/driver.h"

namespace torch_cubin {

class LoadedImage {
 public:
  // Loads `bytes`, which `image` describes. They must have been parsed and hashed before: the
  // driver takes no length and reads past the end of a bad image. `device_index`: the device whose
  // cached memory is released if the driver runs out. Throws [oom], and [driver] with both versions
  // if the image's toolkit is newer than the driver supports.
  static std::shared_ptr<const LoadedImage> load(Image image, const std::vector<uint8_t>& bytes,
                                                 const std::string& origin, int device_index);

  // The same for PTX, which the driver compiles. `text` must end with a NUL. An error contains the
  // compiler's log.
  static std::shared_ptr<const LoadedImage> compile(Image image, const std::vector<uint8_t>& text,
                                                    const std::string& origin, int device_index);

  // Unloads the library now and reports the driver's errors. The caller must have waited for the
  // work that uses it. A second call does nothing.
  void unload() const;
  ~LoadedImage();
  LoadedImage(const LoadedImage&) = delete;
  LoadedImage& operator=(const LoadedImage&) = delete;

  const Image& image() const { return image_; }
  const std::string& origin() const { return origin_; }
  CUlibrary handle() const { return handle_; }
  bool is_compiled() const { return compiled_; }  // from PTX, at load time

 private:
  LoadedImage(Image image, std::string origin)
      : image_(std::move(image)), origin_(std::move(origin)) {}
  Image image_;
  std::string origin_;  // for errors: "cubin 'sm_90a/x.cubin'"
  mutable CUlibrary handle_ = nullptr;
  bool compiled_ = false;
};

}  // namespace torch_cubin
