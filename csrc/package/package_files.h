// PackageFiles: the source of a package's files: a folder, or a library into which
// torch_cubin.embed put them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cubin/embedded.h"

namespace torch_cubin {

class PackageFiles {
 public:
  virtual ~PackageFiles() = default;

  // Throws [file].
  virtual std::vector<uint8_t> read(const std::string& name, size_t limit) const = 0;

  // For errors: "file '/x/vec_add.cubin'".
  virtual std::string origin(const std::string& name) const = 0;
};

// kInside: refuses a link that leads out of the folder, which an untrusted package might have.
enum class Links { kFollow, kInside };

// For kInside, `root` must be free of links.
std::unique_ptr<PackageFiles> files_in_folder(const std::string& root, Links links);

// `library` names the library in errors; its bytes must outlive the result.
std::unique_ptr<PackageFiles> files_in_library(const std::string& library, Bundle files);

// Whether a manifest may name the file: it must be a relative path without '..'.
bool is_inside_package(const std::string& name);

// The path with links resolved; "" if it does not exist.
std::string without_links(const std::string& path);

// Reads a file and verifies the manifest's hash. Throws [file], [hash].
std::vector<uint8_t> read_hashed(const PackageFiles& files, const std::string& name,
                                 const std::string& sha256, size_t limit,
                                 const std::string& advice);

}  // namespace torch_cubin
