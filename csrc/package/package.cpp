#include "package/package.h"

#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "cubin/arch.h"
#include "cubin/error.h"
#include "package/archived_files.h"
#include "package/fields.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr size_t kMaxNesting = 200;
constexpr size_t kMaxManifestBytes = 64u << 20;
constexpr int kKernelsVersion = 1;

// Throws for JSON that is nested too deeply or repeats a key in one object.
class JsonChecker : public nlohmann::json_sax<json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return enter(); }
  bool start_array(size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  bool key(string_t& name) override {
    if (!keys_.back().insert(name).second) {
      throw std::runtime_error("the key '" + name + "' stands twice in one object");
    }
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;  // json::parse reports it
  }

 private:
  bool enter() {
    if (keys_.size() >= kMaxNesting) throw std::length_error("it is nested too deeply");
    keys_.emplace_back();
    return true;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::unordered_set<std::string>> keys_;  // of the open objects
};

// `trust` is null for packages that ship with the library.
json read_manifest(const PackageFiles& files, const std::string& label, const Trust* trust) {
  const std::vector<uint8_t> bytes = files.read("manifest.json", kMaxManifestBytes);
  if (trust != nullptr) check_signature(*trust, files, bytes, label);
  return parse_json(std::string(bytes.begin(), bytes.end()), label + ": manifest.json");
}

}  // namespace

json parse_json(const std::string& text, const std::string& origin) {
  try {
    // nlohmann's parser treats a NUL byte as the end.
    if (text.find('\0') != std::string::npos) throw std::runtime_error("it has a NUL byte");
    // First the checks that json::parse lacks. (Its callbacks would take time quadratic in the
    // length of a list of objects.)
    JsonChecker checker;
    json::sax_parse(text, &checker);
    return json::parse(text);
  } catch (const std::exception& error) {
    fail({"file", origin, "is not JSON", "", printable(error.what()), ""});
  }
}

Package::Package(std::shared_ptr<const PackageFiles> files, std::string label)
    : files_(std::move(files)),
      label_(std::move(label)),
      manifest_(std::make_unique<const json>(read_manifest(*files_, label_, nullptr))) {}

Package::Package(std::shared_ptr<const PackageFiles> files, std::string label, const Trust& trust)
    : files_(std::move(files)),
      label_(std::move(label)),
      manifest_(std::make_unique<const json>(read_manifest(*files_, label_, &trust))) {}

Package::~Package() = default;

void Package::read_kernels() {
  try {
    const json& version = manifest_->at("version");
    if (!version.is_number_integer() || version != kKernelsVersion) {
      throw std::runtime_error("version " + shown_json(version));
    }
    const auto files = with_archives(files_, *manifest_);
    std::set<std::pair<std::string, std::string>> seen;
    for (const json& object : manifest_->at("kernels")) {
      const KernelEntry& entry = kernels_.emplace_back(object, files).entry();
      if (!seen.emplace(entry.name, entry.arch).second) {
        throw std::runtime_error("kernel '" + entry.name + "' stands twice for " + entry.arch);
      }
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    kernels_.clear();
    fail({"file", "the manifest of " + label_, "cannot be used", "a version 1 kernel manifest",
          error.what(), "Build the kernels again, or install the package again."});
  }
}

std::string Package::arch_for(const Device& device) const {
  const KernelEntry* best = nullptr;
  int best_rank = 0;
  std::set<std::string> found;
  for (const PackageKernel& kernel : kernels_) {
    const KernelEntry& entry = kernel.entry();
    found.insert(entry.arch);
    const int rank = rank_cubin(entry.parsed_arch, device.sm);
    if (rank <= best_rank) continue;
    best = &entry;
    best_rank = rank;
  }
  if (best != nullptr) return best->arch;
  std::string list;
  for (const std::string& arch : found) list += (list.empty() ? "" : ", ") + arch;
  fail({"arch", label_, "has no kernels for " + device.name,
        "an arch that runs on compute capability " + std::to_string(device.sm / 10) + "." +
            std::to_string(device.sm % 10),
        list.empty() ? "none" : list,
        "Build the kernels with TORCH_CUBIN_ARCHS=sm_" + std::to_string(device.sm) + "."});
}

}  // namespace torch_cubin
