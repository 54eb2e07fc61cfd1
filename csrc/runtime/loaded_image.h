// LoadedImage: an Image given to the driver. One handle of the driver's serves all devices.
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
  // Gives `bytes`, of which `image` tells the facts, to the driver. The bytes must have been
  // parsed and hashed already: the driver takes no length and walks off the end of a bad image.
  // `device_index`: whose memory may be short. Throws [oom], and [driver] with both versions where
  // the image is of a newer toolkit than the driver takes.
  static std::shared_ptr<const LoadedImage> load(Image image, const std::vector<uint8_t>& bytes,
                                                 const std::string& origin, int device_index);

  // The same for PTX, which the driver compiles: `text` ends with a NUL. What the compiler says
  // stands in the error.
  static std::shared_ptr<const LoadedImage> compile(Image image, const std::vector<uint8_t>& text,
                                                    const std::string& origin, int device_index);

  // Unloads the library now and reports its errors. The caller has waited for the
  // work that uses it; a second call does nothing.
  void unload() const;
  ~LoadedImage();
  LoadedImage(const LoadedImage&) = delete;
  LoadedImage& operator=(const LoadedImage&) = delete;

  const Image& image() const { return image_; }
  const std::string& origin() const { return origin_; }
  CUlibrary handle() const { return handle_; }
  bool is_compiled() const { return compiled_; }  // from PTX, for whatever device runs it

 private:
  LoadedImage(Image image, std::string origin)
      : image_(std::move(image)), origin_(std::move(origin)) {}
  Image image_;
  std::string origin_;  // for errors: "cubin 'sm_90a/x.cubin'"
  mutable CUlibrary handle_ = nullptr;
  bool compiled_ = false;
};

}  // namespace torch_cubin
