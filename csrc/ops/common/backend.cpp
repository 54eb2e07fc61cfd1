#include "ops/common/backend.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "package/catalog.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr const char* kOneSourceTree = "Build the library and its kernels from one source tree.";

struct ParamsDigest {
  const char* header;
  const char* digest;
};

// The digest of each csrc/kernels/<family>/<name>_params.h, written by setup.py. build.py in
// csrc/kernels/build writes the same digests to the manifest.
constexpr ParamsDigest kParamsDigests[] = {
#include "params_digests.inc"
};

const KernelBackend* g_first = nullptr;
const KernelBackend** g_last = &g_first;  // where the next backend is linked

std::string label_of(const std::string& kernel) { return "catalog kernel '" + kernel + "'"; }

[[noreturn]] void refuse_params(const KernelEntry& entry, const std::string& expected,
                                const std::string& got) {
  fail({"params", label_of(entry.name), "takes other parameters than this library passes", expected,
        got, kOneSourceTree});
}

// The backends that own the kernel, each of which has checked it: at least one.
std::vector<const KernelBackend*> owners_of(PackageKernel& kernel) {
  const KernelEntry& entry = kernel.entry();
  std::vector<const KernelBackend*> owners;
  bool known = false;
  for (const KernelBackend* backend = KernelBackend::first(); backend != nullptr;
       backend = backend->next()) {
    if (entry.family != backend->family()) continue;
    known = true;
    if (!backend->owns(entry)) continue;
    backend->check(kernel);
    owners.push_back(backend);
  }
  if (!owners.empty()) return owners;
  if (!known) {
    refuse_params(entry, "a family that this library has", "family '" + entry.family + "'");
  }
  fail({"params", label_of(entry.name),
        "is of a kind that the " + entry.family + " family does not know",
        "a kind that this library has",
        "'" + entry.kind + "'" +
            (entry.params_header.empty() ? "" : " of " + printable(entry.params_header)),
        kOneSourceTree});
}

const json& empty_object() {
  static const auto* const empty = new json(json::object());  // leaked on purpose
  return *empty;
}

}  // namespace

KernelBackend::KernelBackend(const char* family) : family_(family) {
  *g_last = this;
  g_last = &next_;
}

const KernelBackend* KernelBackend::first() { return g_first; }

bool KernelBackend::owns(const KernelEntry& entry) const {
  for (const char* const* kind = kinds_; *kind != nullptr; ++kind) {
    if (entry.kind == *kind) return true;
  }
  return kinds_[0] == nullptr;
}

void check_params(const KernelEntry& entry, const char* header, size_t bytes) {
  const char* digest = "";
  for (const ParamsDigest& known : kParamsDigests) {
    if (std::strcmp(known.header, header) == 0) digest = known.digest;
  }
  if (entry.params_digest != digest || digest[0] == '\0') {
    refuse_params(entry, std::string("params_digest ") + digest,
                  entry.params_digest.empty() ? "none" : entry.params_digest);
  }
  // The offset is not compared: a struct aligned to 64 bytes, such as one with tensor maps, starts
  // 48 bytes into the parameter space.
  if (entry.params.size() == 1 && entry.params[0].size == bytes) return;
  refuse_params(entry, "one struct of " + counted(bytes, "byte"),
                counted(entry.params.size(), "parameter"));
}

KernelFields::KernelFields(const PackageKernel& kernel)
    : KernelFields(kernel.entry().name, kernel.fields()) {}

void KernelFields::refuse(const char* name, const std::string& expected) const {
  const auto found = object_.find(name);
  fail({"file", label_of(kernel_),
        std::string("has a field '") + name + "' that this library cannot use", expected,
        found == object_.end() ? "none" : printable(found->dump()), kOneSourceTree});
}

const json& KernelFields::at(const char* name) const {
  const auto found = object_.find(name);
  if (found == object_.end()) refuse(name, "a value");
  return *found;
}

std::string KernelFields::text(const char* name) const {
  const json& value = at(name);
  if (!value.is_string()) refuse(name, "a text");
  return value.get<std::string>();
}

std::string KernelFields::text(const char* name, const char* otherwise) const {
  return object_.contains(name) ? text(name) : otherwise;
}

int64_t KernelFields::integer(const char* name, int64_t least, int64_t most) const {
  const json& value = at(name);
  if (!value.is_number_integer() || value.get<int64_t>() < least || value.get<int64_t>() > most) {
    refuse(name, "an integer of at least " + std::to_string(least));
  }
  return value.get<int64_t>();
}

double KernelFields::number(const char* name, double least) const {
  const json& value = at(name);
  if (!value.is_number() || !(value.get<double>() >= least)) {
    refuse(name, "a number of at least " + std::to_string(least));
  }
  return value.get<double>();
}

double KernelFields::number(const char* name, double least, double otherwise) const {
  return object_.contains(name) ? number(name, least) : otherwise;
}

void KernelFields::triple(const char* name, int64_t least, int64_t (&out)[3]) const {
  const json& value = at(name);
  bool fits = value.is_array() && value.size() == 3;
  for (size_t i = 0; fits && i < 3; ++i) {
    fits = value[i].is_number_integer() && value[i].get<int64_t>() >= least;
    if (fits) out[i] = value[i].get<int64_t>();
  }
  if (!fits) refuse(name, "3 integers of at least " + std::to_string(least));
}

KernelFields KernelFields::object(const char* name) const {
  if (!object_.contains(name)) return {kernel_, empty_object()};
  const json& value = object_.at(name);
  if (!value.is_object()) refuse(name, "an object");
  return {kernel_, value};
}

FamilyKernels::FamilyKernels(const char* family, const Device& device)
    : arch_(catalog().arch_for(device)) {
  for (const KernelBackend* backend = KernelBackend::first(); backend != nullptr;
       backend = backend->next()) {
    if (std::strcmp(backend->family(), family) == 0) backends_.push_back({backend, {}});
  }
  for (PackageKernel& kernel : catalog().kernels()) {
    const KernelEntry& entry = kernel.entry();
    if (entry.family != family || entry.arch != arch_) continue;
    try {
      const std::vector<const KernelBackend*> owners = owners_of(kernel);
      for (auto& [backend, own] : backends_) {
        if (std::find(owners.begin(), owners.end(), backend) != owners.end())
          own.push_back(&kernel);
      }
    } catch (const Error& error) {
      if (!message_.empty()) continue;
      tag_ = error.tag();
      message_ = error.what();
    }
  }
}

void FamilyKernels::fail_no_kernel(const std::string& problem) const {
  if (!message_.empty()) fail_with_text(tag_, message_);
  fail({"no_kernel", "the kernel catalog", "has no kernel for " + problem, "a kernel of " + arch_,
        "none for its dtype and layout", kOneSourceTree});
}

json catalog_with_refused() {
  json out = catalog_json();
  json refused = json::array();
  for (PackageKernel& kernel : catalog().kernels()) {
    const KernelEntry& entry = kernel.entry();
    try {
      owners_of(kernel);
    } catch (const Error& error) {
      refused.push_back({{"name", entry.name}, {"arch", entry.arch}, {"message", error.what()}});
    }
  }
  out["refused"] = refused;
  return out;
}

}  // namespace torch_cubin
