#include "contract/user_images.h"

namespace torch_cubin {

std::vector<SourceImage> images_of(const uint8_t* data, size_t size, const std::string& origin,
                                   bool jit) {
  static_cast<void>(jit);
  std::vector<SourceImage> images(1);
  images[0].image = parse_cubin(data, size, origin);
  images[0].bytes.assign(data, data + size);
  images[0].origin = origin;
  return images;
}

}  // namespace torch_cubin
