// Package: a folder (or a section of a library) with manifest.json and images, each with its
// sha256. docs/manifest.md describes packages of declared ops, csrc/kernels/README.md those of
// kernels. Knows no op by name.
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
  // The same for packages that are not this library's own; throws [hash] as check_signature() says.
  Package(std::shared_ptr<const PackageFiles> files, std::string label, const Trust& trust);
  ~Package();
  Package(const Package&) = delete;
  Package& operator=(const Package&) = delete;

  const std::string& label() const { return label_; }
  const nlohmann::json& manifest() const { return *manifest_; }
  const std::shared_ptr<const PackageFiles>& files() const { return files_; }

  // Reads the manifest's "kernels" (version 1). Throws [file] where one is malformed; then nothing
  // is half-read. What only the kernel's host code understands is not looked at.
  void read_kernels();
  std::deque<PackageKernel>& kernels() { return kernels_; }

  // The best arch of the kernels for a device: exact with 'a', then family 'f', then the highest
  // plain one of the same major. Throws [arch], listing wanted and found.
  std::string arch_for(const Device& device) const;

 private:
  std::shared_ptr<const PackageFiles> files_;
  std::string label_;
  std::unique_ptr<const nlohmann::json> manifest_;
  std::deque<PackageKernel> kernels_;  // never moved: they hand out references
};

// JSON text of at most 200 levels, which cannot overflow the stack, without a key twice in an object.
// Throws [file].
nlohmann::json parse_json(const std::string& text, const std::string& origin);

}  // namespace torch_cubin
