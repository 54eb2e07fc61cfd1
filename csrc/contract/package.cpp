#include "contract/package.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "contract/fields.h"
#include "contract/kept_error.h"
#include "contract/package_files.h"
#include "contract/slots.h"
#include "cubin/error.h"
#include "cubin/sha256.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;
constexpr int kMaxDepth = 200;  // of a manifest: it must not overflow the stack
constexpr size_t kMaxManifestBytes = 64 << 20;
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
  fail({"file", label, "has a version that this torch_cubin does not read",
        std::to_string(kVersion), shown_json(version),
        "Load it with the torch_cubin that wrote it, or a newer one."});
}

std::vector<std::unique_ptr<const Contract>> read_contracts(const json& ops,
                                                            ContractImages& images) {
  std::vector<std::unique_ptr<const Contract>> contracts;
  for (const json& op : ops) contracts.push_back(std::make_unique<Contract>(op, images));
  return contracts;
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
  const std::vector<uint8_t> bytes = files.read(name, kMaxImageBytes, label);
  const std::string found = sha256_hex(bytes.data(), bytes.size());
  if (found != wanted) {
    fail({"hash", printable(files.origin(name), PATH_MAX),
          "is not the one that the package was made with", "sha256 " + wanted, "sha256 " + found,
          "Copy the package again."});
  }
  images.add(bytes.data(), bytes.size(), files.origin(name));
}

// Adds a package's contracts, and the JSON of each.
void read_package(const PackageFiles& files,
                  std::vector<std::unique_ptr<const Contract>>& contracts,
                  std::vector<json>& definitions) {
  const std::string& label = files.label();
  const std::vector<uint8_t> bytes = files.read("manifest.json", kMaxManifestBytes, label);
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
  for (auto& contract : read_contracts(ops, images)) contracts.push_back(std::move(contract));
  definitions.insert(definitions.end(), ops.begin(), ops.end());
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

json load_package(const std::string& path) {
  std::vector<std::unique_ptr<const Contract>> contracts;
  std::vector<json> definitions;
  for (const PackageFiles& files : PackageFiles::at(path)) {
    read_package(files, contracts, definitions);
  }
  json answer = define_contracts(std::move(contracts));
  for (size_t i = 0; i < definitions.size(); ++i) answer[i]["contract"] = definitions[i];
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
