#include "package/open_images.h"

#include <algorithm>
#include <climits>
#include <memory>
#include <string_view>
#include <utility>

#include "cubin/embedded.h"
#include "cubin/error.h"
#include "cubin/extent.h"
#include "cubin/sniff.h"
#include "package/files.h"
#include "package/package_images.h"
#include "package/triton_notes.h"
#include "package/user_images.h"

namespace torch_cubin {
namespace {

constexpr char kManifest[] = "manifest.json";

std::vector<SourceImage> images_of_bundle(const Bytes& bytes, const std::string& origin, bool jit) {
  std::vector<Bundle> bundles;
  list_bundles(bytes, 0, bytes.size(), origin, bundles);
  std::vector<SourceImage> images;
  for (Bundle& bundle : bundles) {
    if (is_package(bundle)) {
      append_source(images_of_package(files_in_library(origin, std::move(bundle)), origin, jit),
                    images);
      continue;
    }
    for (const EmbeddedFile& file : bundle) {
      append_source(
          images_of(file.bytes.data(), file.bytes.size(),
                    "file '" + printable(file.name, PATH_MAX) + "' embedded in " + origin, jit),
          images);
    }
  }
  return images;
}

}  // namespace

std::vector<SourceImage> images_in_memory(const void* data, uint64_t size,
                                          const std::string& origin, bool jit) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  if (bytes == nullptr) {
    fail({"image", origin, "is a null pointer", "the address of an image", "", ""});
  }
  if (size == kUnknownSize) size = extent_of(bytes, readable_bytes(bytes), origin);
  if (size > kMaxImageBytes) {
    fail({"image", origin, "is too large", "at most " + std::to_string(kMaxImageBytes) + " bytes",
          std::to_string(size) + " bytes", ""});
  }
  const std::string_view start(static_cast<const char*>(data), std::min<size_t>(size, 8));
  if (start == kBundleMagic) {
    return images_of_bundle(Bytes(bytes, static_cast<size_t>(size)), origin, jit);
  }
  return images_of(bytes, without_padding(bytes, static_cast<size_t>(size)), origin, jit);
}

std::vector<SourceImage> images_at_path(const std::string& path, bool jit) {
  const std::string root = without_links(path);
  if (!root.empty() && !is_regular_file(root) && is_regular_file(root + "/" + kManifest)) {
    return images_of_package(files_in_folder(root, Links::kInside), root, jit);
  }
  const std::string file = cubin_at(path);
  const std::vector<uint8_t> bytes = read_file(file, kMaxImageBytes);
  std::vector<SourceImage> images =
      images_in_memory(bytes.data(), bytes.size(), "file '" + printable(file, PATH_MAX) + "'", jit);
  add_triton_notes(path, images);
  return images;
}

}  // namespace torch_cubin
