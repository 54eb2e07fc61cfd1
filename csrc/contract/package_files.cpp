#include "contract/package_files.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <memory>

#include "contract/files.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

struct Freed {
  void operator()(char* text) const { std::free(text); }
};

// The path without links; "" where it does not exist.
std::string resolved(const std::string& path) {
  const std::unique_ptr<char, Freed> found(realpath(path.c_str(), nullptr));
  return found == nullptr ? "" : found.get();
}

[[noreturn]] void leads_out(const std::string& name, const std::string& label,
                            const std::string& expected) {
  fail({"file", label, "names a file outside of its package", expected, "'" + printable(name) + "'",
        ""});
}

void check_relative(const std::string& name, const std::string& label) {
  if (name.empty() || name[0] == '/' || name.find('\0') != std::string::npos) {
    leads_out(name, label, "a path relative to the folder");
  }
  for (size_t start = 0; start <= name.size();) {
    const size_t end = std::min(name.find('/', start), name.size());
    if (name.compare(start, end - start, "..") == 0) leads_out(name, label, "a path without '..'");
    start = end + 1;
  }
}

void check_links(const std::string& folder, const std::string& name, const std::string& label) {
  const std::string root = resolved(folder);
  const std::string real = resolved(folder + "/" + name);
  if (!real.empty() && real.compare(0, root.size() + 1, root + "/") != 0 && root != "/") {
    leads_out(name, label, "no link out of " + printable(root));
  }
}

}  // namespace

std::vector<PackageFiles> PackageFiles::at(const std::string& path) {
  PackageFiles folder;
  folder.path_ = path;
  folder.label_ = "package '" + printable(path, PATH_MAX) + "'";
  if (!is_regular_file(path)) return {folder};
  const std::vector<uint8_t> library = read_file(path, kMaxImageBytes);
  std::vector<PackageFiles> packages;
  for (const Bundle& bundle : embedded_bundles(Bytes(library.data(), library.size()),
                                               "file '" + printable(path, PATH_MAX) + "'")) {
    PackageFiles package = folder;
    package.in_library_ = true;
    bool has_manifest = false;
    for (const EmbeddedFile& file : bundle) {
      has_manifest = has_manifest || file.name == "manifest.json";
      package.embedded_.push_back(
          {file.name, {file.bytes.data(), file.bytes.data() + file.bytes.size()}});
    }
    if (has_manifest) packages.push_back(std::move(package));
  }
  if (packages.empty()) {
    fail({"file", "file '" + printable(path, PATH_MAX) + "'",
          "is a library without a package in it",
          "one that torch_cubin.embed made of a package, or a package's folder", "",
          "Cubins that are no package are for torch_cubin.load()."});
  }
  return packages;
}

std::string PackageFiles::origin(const std::string& name) const {
  if (!in_library_) return "file '" + path_ + "/" + name + "'";
  return "file '" + name + "' embedded in '" + path_ + "'";
}

std::vector<uint8_t> PackageFiles::read(const std::string& name, size_t limit,
                                        const std::string& label) const {
  check_relative(name, label);
  if (!in_library_) {
    check_links(path_, name, label);
    return read_file(path_ + "/" + name, limit);
  }
  for (const File& file : embedded_) {
    if (file.name != name) continue;
    if (file.bytes.size() <= limit) return file.bytes;
    fail({"file", printable(origin(name), PATH_MAX), "is too large",
          "at most " + std::to_string(limit) + " bytes", std::to_string(file.bytes.size()), ""});
  }
  fail(
      {"file", printable(origin(name), PATH_MAX), "is missing", "what the manifest lists", "", ""});
}

}  // namespace torch_cubin
