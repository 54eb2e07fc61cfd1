#include "package/package_images.h"

#include <climits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "cubin/error.h"
#include "package/fields.h"
#include "package/files.h"
#include "package/package.h"
#include "package/user_images.h"

namespace torch_cubin {

std::vector<SourceImage> images_of_package(std::unique_ptr<PackageFiles> files,
                                           const std::string& path, bool jit) {
  const Package package(std::move(files), "package '" + printable(path, PATH_MAX) + "'", Trust());
  const nlohmann::json& manifest = package.manifest();
  const char* list = manifest.contains("images") ? "images" : "kernels";
  std::vector<SourceImage> images;
  std::set<std::string> seen;
  Fields fields(manifest, package.label());
  for (const nlohmann::json& entry : fields.list(list)) {
    Fields image(entry, package.label() + ": " + list);
    const std::string name = image.text("file");
    if (!is_inside_package(name)) {
      fail({"file", package.label(), "names a file outside of the package",
            "a relative path without '..'", "'" + printable(name) + "'", ""});
    }
    if (!seen.insert(name).second) continue;
    const std::vector<uint8_t> bytes = read_hashed(*package.files(), name, image.text("sha256"),
                                                   kMaxImageBytes, "Copy the package again.");
    append_source(images_of(bytes.data(), bytes.size(), package.files()->origin(name), jit),
                  images);
  }
  return images;
}

}  // namespace torch_cubin
