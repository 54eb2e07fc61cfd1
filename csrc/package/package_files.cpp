#include "package/package_files.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <utility>

#include "cubin/error.h"
#include "cubin/sha256.h"
#include "package/files.h"

namespace torch_cubin {
namespace {

class Folder : public PackageFiles {
 public:
  Folder(std::string root, Links links) : root_(std::move(root)), links_(links) {}

  std::vector<uint8_t> read(const std::string& name, size_t limit) const override {
    const std::string path = root_ + "/" + name;
    if (links_ == Links::kFollow) return read_file(path, limit);
    const std::string real = without_links(path);
    if (!real.empty() && root_ != "/" && real.compare(0, root_.size() + 1, root_ + "/") != 0) {
      fail({"file", origin(name), "is a link out of its package",
            "a file below " + printable(root_), printable(real), ""});
    }
    return read_file(real.empty() ? path : real, limit);
  }

  std::string origin(const std::string& name) const override {
    return "file '" + printable(root_ + "/" + name, PATH_MAX) + "'";
  }

 private:
  std::string root_;
  Links links_;
};

class Embedded : public PackageFiles {
 public:
  Embedded(std::string library, Bundle files)
      : library_(std::move(library)), files_(std::move(files)) {}

  std::vector<uint8_t> read(const std::string& name, size_t limit) const override {
    const auto file = std::find_if(files_.begin(), files_.end(),
                                   [&](const EmbeddedFile& each) { return each.name == name; });
    if (file == files_.end()) {
      fail({"file", origin(name), "is missing", "what the manifest lists", "", ""});
    }
    const size_t size = file->bytes.size();
    if (size > limit) {
      fail({"file", origin(name), "is too large", "at most " + std::to_string(limit) + " bytes",
            std::to_string(size) + " bytes", ""});
    }
    return {file->bytes.data(), file->bytes.data() + size};
  }

  std::string origin(const std::string& name) const override {
    return "file '" + printable(name, PATH_MAX) + "' embedded in " + library_;
  }

 private:
  std::string library_;  // "file '/x/libmine.so'"
  Bundle files_;
};

struct FreesText {
  void operator()(char* text) const { std::free(text); }
};

}  // namespace

std::unique_ptr<PackageFiles> files_in_folder(const std::string& root, Links links) {
  return std::make_unique<Folder>(root, links);
}

std::unique_ptr<PackageFiles> files_in_library(const std::string& library, Bundle files) {
  return std::make_unique<Embedded>(library, std::move(files));
}

bool is_inside_package(const std::string& name) {
  bool inside = !name.empty() && name[0] != '/' && name.find('\0') == std::string::npos;
  for (size_t start = 0; inside && start <= name.size();) {
    const size_t end = std::min(name.find('/', start), name.size());
    inside = name.compare(start, end - start, "..") != 0;
    start = end + 1;
  }
  return inside;
}

std::string without_links(const std::string& path) {
  const std::unique_ptr<char, FreesText> found(realpath(path.c_str(), nullptr));
  return found == nullptr ? "" : found.get();
}

std::vector<uint8_t> read_hashed(const PackageFiles& files, const std::string& name,
                                 const std::string& sha256, size_t limit,
                                 const std::string& advice) {
  std::vector<uint8_t> bytes = files.read(name, limit);
  const std::string found = sha256_hex(bytes.data(), bytes.size());
  if (found == sha256) return bytes;
  fail({"hash", files.origin(name), "is not the one that the package was made with",
        "sha256 " + sha256, "sha256 " + found, advice});
}

}  // namespace torch_cubin
