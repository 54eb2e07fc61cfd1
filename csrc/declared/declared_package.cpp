#include "declared/declared_package.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "cubin/embedded.h"
#include "cubin/error.h"
#include "cubin/hex.h"
#include "declared/slots.h"
#include "package/fields.h"
#include "package/files.h"
#include "package/load_error.h"
#include "package/package.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;
constexpr const char* kFormat = "torch_cubin package";
constexpr size_t kMaxListed = 1000000;  // bounds the answer: every op lists its package's images

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

// The indices of the images that were read, by file and sha256.
using ImagePlaces = std::map<std::pair<std::string, std::string>, size_t>;

void add_image(const json& image, const Package& package, const std::string& folder,
               const std::string& label, ContractImages& images, ImagePlaces& known) {
  Fields fields(image, label);
  const std::string name = fields.text("file");
  const std::string sha256 = fields.text("sha256");
  fields.finish();
  if (sha256.size() != 64 || !is_hex(sha256))
    refuse_json(fields.at("sha256"), "64 lower-case hex digits", image["sha256"]);
  if (!is_inside_package(name)) {
    fail({"file", label, "names a file outside of its package", "a relative path without '..'",
          "'" + printable(name) + "'", ""});
  }
  const auto [first, is_new] = known.emplace(std::pair(name, sha256), images.count());
  if (!is_new) return images.add_again(first->second);
  const PackageFiles& files = *package.files();
  images.add(read_hashed(files, name, sha256, kMaxImageBytes, "Copy the package again."),
             files.origin(name), folder.empty() ? "" : folder + "/" + name);
}

// `path` names the package in errors and results; `folder` is the same, or "" for a library.
void read_package(std::unique_ptr<PackageFiles> files, const std::string& path,
                  const std::string& folder, const Trust& trust, Contracts& contracts) {
  const Package package(std::move(files), "package '" + printable(path, PATH_MAX) + "'", trust);
  const std::string& label = package.label();
  const json& manifest = package.manifest();
  Fields fields(manifest, label);
  if (fields.text("format") != kFormat) {
    fail({"file", label, "has a manifest of another kind", std::string("format '") + kFormat + "'",
          shown_json(manifest["format"]), ""});
  }
  check_version(fields, label);
  const json& list = fields.list("images");
  const json& ops = fields.list("ops");
  fields.finish();
  if (list.size() * ops.size() > kMaxListed) {
    fail({"file", label, "names too many images and ops",
          "at most " + std::to_string(kMaxListed) + " images times ops",
          counted(list.size(), "image") + " and " + counted(ops.size(), "op"), ""});
  }
  ContractImages images;
  ImagePlaces known;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string at = label + ": images[" + std::to_string(i) + "]";
    add_image(list[i], package, folder, at, images, known);
  }
  read_contracts(ops, images, path, contracts);
}

void read_packages_in_library(const std::string& path, const Trust& trust, Contracts& contracts) {
  const std::string origin = "file '" + printable(path, PATH_MAX) + "'";
  const std::vector<uint8_t> bytes = read_file(path, kMaxImageBytes);
  bool found = false;
  for (Bundle& bundle : embedded_bundles(Bytes(bytes.data(), bytes.size()), origin)) {
    const bool has_manifest =
        std::any_of(bundle.begin(), bundle.end(),
                    [](const EmbeddedFile& file) { return file.name == "manifest.json"; });
    if (!has_manifest) continue;  // cubins, for torch_cubin.load()
    read_package(files_in_library(origin, std::move(bundle)), path, "", trust, contracts);
    found = true;
  }
  if (!found) {
    fail({"file", origin, "is a library without a package in it",
          "a package's folder, or a library that torch_cubin.embed made of one", "", ""});
  }
}

}  // namespace

json define_ops(const std::string& text, ContractImages& images) {
  const json definition = parse_json(text, "the definition");
  Fields fields(definition, "the definition");
  check_version(fields, "the definition");
  const json& ops = fields.list("ops");
  fields.finish();
  Contracts contracts;
  read_contracts(ops, images, "", contracts);
  return define_contracts(std::move(contracts));
}

json load_package(const std::string& path, const Trust& trust) {
  const std::string root = without_links(path);
  if (root.empty()) {
    fail({"file", "package '" + printable(path, PATH_MAX) + "'", "does not exist",
          "a folder, or a library", "", ""});
  }
  Contracts contracts;
  if (is_regular_file(root)) {
    read_packages_in_library(root, trust, contracts);
  } else {
    read_package(files_in_folder(root, Links::kInside), root, root, trust, contracts);
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
        keep_load_error(error.tag(),
                        std::string(error.what()) + " (TORCH_CUBIN_PACKAGES names it.)");
      } catch (const std::exception& error) {
        keep_load_error("internal", std::string("torch_cubin [internal]: ") + error.what());
      }
    }
  } catch (...) {
    // Out of memory while a library is being loaded: the error cannot be stored, and throwing would
    // abort.
  }
}

}  // namespace torch_cubin
