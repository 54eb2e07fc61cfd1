// Package: a folder (or a section of a library) with manifest.json and images, each with its
// sha256. docs/manifest.md describes packages of declared ops, csrc/kernels/README.md those of
// kernels. Independent of specific ops.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "package/package_files.h"
#include "package/package_kernel.h"
#include "package/signature.h"

namespace torch_cubin {

class Package {
 public:
  // Reads the manifest. `label` names the package in errors: "package '/x'". Throws [file].
  Package(std::shared_ptr<const PackageFiles> files, std::string label);
  // The same for packages that do not ship with the library. Also throws as check_signature() does.
  Package(std::shared_ptr<const PackageFiles> files, std::string label, const Trust& trust);
  ~Package();
  Package(const Package&) = delete;
  Package& operator=(const Package&) = delete;

  const std::string& label() const { return label_; }
  const nlohmann::json& manifest() const { return *manifest_; }
  const std::shared_ptr<const PackageFiles>& files() const { return files_; }

  // Reads the manifest's "kernels" (version 1). If one is malformed, throws [file] and keeps none.
  // Fields that only a kernel's host code understands are not checked.
  void read_kernels();
  std::deque<PackageKernel>& kernels() { return kernels_; }

  // The best arch of the kernels for a device: the exact 'a' arch, then the family 'f', then the
  // highest plain arch of the same major. Throws [arch] with the required and the available archs.
  std::string arch_for(const Device& device) const;

 private:
  std::shared_ptr<const PackageFiles> files_;
  std::string label_;
  std::unique_ptr<const nlohmann::json> manifest_;
  std::deque<PackageKernel> kernels_;  // elements never move, since callers hold references
};

// Parses JSON of at most 200 levels, which cannot overflow the stack. Throws [file] for malformed
// text and for a repeated key in an object.
nlohmann::json parse_json(const std::string& text, const std::string& origin);

}  // namespace torch_cubin
