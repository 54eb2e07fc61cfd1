// The files of a package, by the names that its manifest uses: out of a folder, or out of a library
// that torch_cubin.embed made (cubin/embedded.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cubin/embedded.h"

namespace torch_cubin {

class PackageFiles {
 public:
  // A folder's, or one for each package in a library. Throws [file] for a path that is neither, and
  // what embedded_bundles() throws.
  static std::vector<PackageFiles> at(const std::string& path);

  // For errors: "package '/opt/mine/kernels'".
  const std::string& label() const { return label_; }

  // For errors: "file '...'".
  std::string origin(const std::string& name) const;

  // Throws [file] for a file that is not there or too large, or a name that leads out of the package;
  // `label` is what names it.
  std::vector<uint8_t> read(const std::string& name, size_t limit, const std::string& label) const;

 private:
  std::string path_, label_;
  bool in_library_ = false;
  struct File {
    std::string name;
    std::vector<uint8_t> bytes;
  };
  std::vector<File> embedded_;
};

}  // namespace torch_cubin
