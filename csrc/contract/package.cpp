#include "contract/package.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "contract/fields.h"
#include "contract/files.h"
#include "contract/kept_error.h"
#include "contract/slots.h"
#include "cubin/error.h"
#include "cubin/sha256.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;
constexpr int kMaxDepth = 200;  // of a manifest: it must not overflow the stack
constexpr size_t kMaxManifestBytes = 64 << 20;
constexpr size_t kMaxImageBytes = size_t{1} << 30;
constexpr const char* kFormat = "torch_cubin package";

json parse(const std::string& text, const std::string& origin) {
  try {
    return json::parse(text, [](int depth, json::parse_event_t, json&) {
      if (depth > kMaxDepth) throw std::length_error("it is nested too deeply");
      return true;
    });
  } catch (const std::exception& error) {
    fail({"file", origin, "is not JSON", "", printable(error.what()), ""});
  }
}

void check_version(Fields& fields, const std::string& label) {
  const json& version = fields.get("version");
  if (version == kVersion) return;
  fail({"file", label, "has a version that this torch_cubin does not read", std::to_string(kVersion),
        shown_json(version), "Load it with the torch_cubin that wrote it, or a newer one."});
}

std::vector<std::unique_ptr<const Contract>> read_contracts(const json& ops,
                                                            ContractImages& images) {
  std::vector<std::unique_ptr<const Contract>> contracts;
  for (const json& op : ops) contracts.push_back(std::make_unique<Contract>(op, images));
  return contracts;
}

struct Freed {
  void operator()(char* text) const { std::free(text); }
};

// The path without links; "" where it does not exist.
std::string resolved(const std::string& path) {
  const std::unique_ptr<char, Freed> found(realpath(path.c_str(), nullptr));
  return found == nullptr ? "" : found.get();
}

// The path of a file of the package; it must lie in the folder.
std::string path_in(const std::string& folder, const std::string& name, const std::string& label) {
  const auto refuse = [&](const std::string& expected) {
    fail({"file", label, "names a file outside of its package", expected,
          "'" + printable(name) + "'", ""});
  };
  if (name.empty() || name[0] == '/' || name.find('\0') != std::string::npos) {
    refuse("a path relative to the folder");
  }
  for (size_t start = 0; start <= name.size();) {
    const size_t end = std::min(name.find('/', start), name.size());
    if (name.compare(start, end - start, "..") == 0) refuse("a path without '..'");
    start = end + 1;
  }
  const std::string path = folder + "/" + name;
  const std::string root = resolved(folder);
  const std::string real = resolved(path);
  if (!real.empty() && real.compare(0, root.size() + 1, root + "/") != 0 && root != "/") {
    refuse("no link out of " + printable(root));
  }
  return path;
}

void add_image(const json& image, const std::string& folder, const std::string& label,
               ContractImages& images) {
  Fields fields(image, label);
  const std::string name = fields.text("file");
  const std::string wanted = fields.text("sha256");
  fields.finish();
  const bool digits = wanted.size() == 64 && std::all_of(wanted.begin(), wanted.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
  });
  if (!digits) refuse_json(fields.at("sha256"), "64 lower-case hex digits", image["sha256"]);
  const std::string path = path_in(folder, name, label);
  const std::vector<uint8_t> bytes = read_file(path, kMaxImageBytes);
  const std::string found = sha256_hex(bytes.data(), bytes.size());
  if (found != wanted) {
    fail({"hash", "file '" + printable(path) + "'", "is not the one that the package was made with",
          "sha256 " + wanted, "sha256 " + found, "Copy the package again."});
  }
  images.add(bytes.data(), bytes.size(), "file '" + path + "'");
}

}  // namespace

json define_ops(const std::string& text, ContractImages& images) {
  const json definition = parse(text, "the definition");
  Fields fields(definition, "the definition");
  check_version(fields, "the definition");
  const json& ops = fields.list("ops");
  fields.finish();
  return define_contracts(read_contracts(ops, images));
}

json load_package(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  const std::string label = "package '" + printable(folder, PATH_MAX) + "'";
  const std::vector<uint8_t> bytes = read_file(path, kMaxManifestBytes);
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
    add_image(list[i], folder, label + ": images[" + std::to_string(i) + "]", images);
  }
  json answer = define_contracts(read_contracts(ops, images));
  for (size_t i = 0; i < ops.size(); ++i) answer[i]["contract"] = ops[i];
  return answer;
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
