#include "declared/declared_package.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "cubin/embedded.h"
#include "cubin/error.h"
#include "cubin/sha256.h"
#include "declared/slots.h"
#include "package/fields.h"
#include "package/files.h"
#include "package/kept_error.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;
constexpr int kMaxNesting = 200;  // of a manifest: it must not overflow the stack
constexpr size_t kMaxManifestBytes = 64 << 20;
constexpr const char* kFormat = "torch_cubin package";

json parse(const std::string& text, const std::string& origin) {
  try {
    return json::parse(text, [](int depth, json::parse_event_t, json&) {
      if (depth > kMaxNesting) throw std::length_error("it is nested too deeply");
      return true;
    });
  } catch (const std::exception& error) {
    fail({"file", origin, "is not JSON", "", printable(error.what()), ""});
  }
}

void check_version(Fields& fields, const std::string& label) {
  const json& version = fields.get("version");
  if (version.is_number_integer() && version == kVersion) return;
  fail({"file", label, "has a version that this torch_cubin does not read",
        std::to_string(kVersion), shown_json(version),
        "Load it with the torch_cubin that wrote it, or a newer one."});
}

using Contracts = std::vector<std::unique_ptr<const Contract>>;

void read_contracts(const json& ops, ContractImages& images, const std::string& package,
                    Contracts& contracts) {
  for (const json& op : ops) contracts.push_back(std::make_unique<Contract>(op, images, package));
}

struct Freed {
  void operator()(char* text) const { std::free(text); }
};

// The path without links; "" where it does not exist.
std::string resolved(const std::string& path) {
  const std::unique_ptr<char, Freed> found(realpath(path.c_str(), nullptr));
  return found == nullptr ? "" : found.get();
}

// Where a package's files come from.
class PackageFiles {
 public:
  virtual ~PackageFiles() = default;
  // Throws [file].
  virtual std::vector<uint8_t> read(const std::string& name, size_t limit) const = 0;
  // For errors: "file '/x/vec_add.cubin'".
  virtual std::string origin(const std::string& name) const = 0;
};

class Folder : public PackageFiles {
 public:
  explicit Folder(std::string root) : root_(std::move(root)) {}

  std::vector<uint8_t> read(const std::string& name, size_t limit) const override {
    const std::string real = resolved(root_ + "/" + name);
    if (!real.empty() && root_ != "/" && real.compare(0, root_.size() + 1, root_ + "/") != 0) {
      fail({"file", origin(name), "is a link out of its package",
            "a file below " + printable(root_), printable(real), ""});
    }
    return read_file(real.empty() ? root_ + "/" + name : real, limit);
  }

  std::string origin(const std::string& name) const override {
    return "file '" + printable(root_ + "/" + name, PATH_MAX) + "'";
  }

 private:
  std::string root_;  // without links
};

// What torch_cubin.embed put into a library.
class Embedded : public PackageFiles {
 public:
  // The library's bytes must outlive it.
  Embedded(const std::string& library, Bundle files)
      : library_(library), files_(std::move(files)) {}

  const EmbeddedFile* find(const std::string& name) const {
    for (const EmbeddedFile& file : files_) {
      if (file.name == name) return &file;
    }
    return nullptr;
  }

  std::vector<uint8_t> read(const std::string& name, size_t limit) const override {
    const EmbeddedFile* file = find(name);
    if (file == nullptr)
      fail({"file", origin(name), "is missing", "what the manifest lists", "", ""});
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

// A package names only files of its own.
void check_name(const std::string& name, const std::string& label) {
  bool inside = !name.empty() && name[0] != '/' && name.find('\0') == std::string::npos;
  for (size_t start = 0; inside && start <= name.size();) {
    const size_t end = std::min(name.find('/', start), name.size());
    inside = name.compare(start, end - start, "..") != 0;
    start = end + 1;
  }
  if (inside) return;
  fail({"file", label, "names a file outside of its package", "a relative path without '..'",
        "'" + printable(name) + "'", ""});
}

void add_image(const json& image, const PackageFiles& files, const std::string& label,
               ContractImages& images) {
  Fields fields(image, label);
  const std::string name = fields.text("file");
  const std::string wanted = fields.text("sha256");
  fields.finish();
  const bool digits = wanted.size() == 64 && std::all_of(wanted.begin(), wanted.end(), [](char c) {
                        return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
                      });
  if (!digits) refuse_json(fields.at("sha256"), "64 lower-case hex digits", image["sha256"]);
  check_name(name, label);
  std::vector<uint8_t> bytes = files.read(name, kMaxImageBytes);
  const std::string found = sha256_hex(bytes.data(), bytes.size());
  if (found != wanted) {
    fail({"hash", files.origin(name), "is not the one that the package was made with",
          "sha256 " + wanted, "sha256 " + found, "Copy the package again."});
  }
  images.add(std::move(bytes), files.origin(name));
}

// `path` names the package in errors and answers.
void read_package(const PackageFiles& files, const std::string& path, Contracts& contracts) {
  const std::string label = "package '" + printable(path, PATH_MAX) + "'";
  const std::vector<uint8_t> bytes = files.read("manifest.json", kMaxManifestBytes);
  const json manifest = parse(std::string(bytes.begin(), bytes.end()), label + ": manifest.json");
  Fields fields(manifest, label);
  if (fields.text("format") != kFormat) {
    fail({"file", label, "has a manifest of another kind", std::string("format '") + kFormat + "'",
          shown_json(manifest["format"]), ""});
  }
  check_version(fields, label);
  const json& list = fields.list("images");
  const json& ops = fields.list("ops");
  fields.finish();
  ContractImages images;
  for (size_t i = 0; i < list.size(); ++i) {
    add_image(list[i], files, label + ": images[" + std::to_string(i) + "]", images);
  }
  read_contracts(ops, images, path, contracts);
}

void read_packages_in_library(const std::string& path, Contracts& contracts) {
  const std::string origin = "file '" + printable(path, PATH_MAX) + "'";
  const std::vector<uint8_t> bytes = read_file(path, kMaxImageBytes);
  bool found = false;
  for (Bundle& bundle : embedded_bundles(Bytes(bytes.data(), bytes.size()), origin)) {
    const Embedded files(origin, std::move(bundle));
    if (files.find("manifest.json") == nullptr) continue;  // cubins, for torch_cubin.load()
    read_package(files, path, contracts);
    found = true;
  }
  if (!found) {
    fail({"file", origin, "is a library without a package in it",
          "a package's folder, or a library that torch_cubin.embed made of one", "", ""});
  }
}

}  // namespace

json define_ops(const std::string& text, ContractImages& images) {
  const json definition = parse(text, "the definition");
  Fields fields(definition, "the definition");
  check_version(fields, "the definition");
  const json& ops = fields.list("ops");
  fields.finish();
  Contracts contracts;
  read_contracts(ops, images, "", contracts);
  return define_contracts(std::move(contracts));
}

json load_package(const std::string& path) {
  const std::string root = resolved(path);
  if (root.empty()) {
    fail({"file", "package '" + printable(path, PATH_MAX) + "'", "does not exist",
          "a folder, or a library", "", ""});
  }
  Contracts contracts;
  if (is_regular_file(root)) {
    read_packages_in_library(root, contracts);
  } else {
    read_package(Folder(root), root, contracts);
  }
  return define_contracts(std::move(contracts));
}

void load_packages_of_environment() noexcept {
  const char* value = std::getenv("TORCH_CUBIN_PACKAGES");
  if (value == nullptr) return;
  try {
    const std::string paths = value;
    for (size_t start = 0; start <= paths.size();) {
      const size_t end = std::min(paths.find(':', start), paths.size());
      const std::string path = paths.substr(start, end - start);
      start = end + 1;
      if (path.empty()) continue;
      try {
        load_package(path);
      } catch (const Error& error) {
        keep_error(error.tag(), std::string(error.what()) + " (TORCH_CUBIN_PACKAGES names it.)");
      } catch (const std::exception& error) {
        keep_error("internal", std::string("torch_cubin [internal]: ") + error.what());
      }
    }
  } catch (...) {
    // Out of memory while a library is being loaded: nothing can be kept, and throwing would abort.
  }
}

}  // namespace torch_cubin
