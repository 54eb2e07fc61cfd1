// KernelBackend: what the host knows of one device file, in one host file of its name. A family's
// own interface (ops/matmul/backend.h, ops/attention/backend.h) adds which problems it takes, what
// they will cost, and how it launches them.
//
// A new kernel is a device file, a host file and a table: the backend registers itself, and an
// entry of the catalog that no backend understands is that entry's error alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "package/package_kernel.h"

namespace torch_cubin {

class KernelBackend {
 public:
  // A static object of the backend's own file. Allocates nothing: it runs while the library is
  // being loaded. `family` and `kinds` are those of the manifest's entries for this device file;
  // without kinds, it has every kind of the family.
  explicit KernelBackend(const char* family);
  template <size_t kKinds>
  KernelBackend(const char* family, const char* const (&kinds)[kKinds]) : KernelBackend(family) {
    static_assert(kKinds <= kMostKinds, "raise kMostKinds");
    std::copy(kinds, kinds + kKinds, kinds_);
  }
  virtual ~KernelBackend() = default;
  KernelBackend(const KernelBackend&) = delete;
  KernelBackend& operator=(const KernelBackend&) = delete;

  const char* family() const { return family_; }

  // Whether an entry of its family is of this device file.
  bool owns(const KernelEntry& entry) const;

  // Throws what is wrong with an entry that it owns: check_params(), and fields that it cannot
  // read.
  virtual void check(PackageKernel& kernel) const = 0;

  // All backends, in the order of their registration.
  static const KernelBackend* first();
  const KernelBackend* next() const { return next_; }

 private:
  static constexpr size_t kMostKinds = 8;
  const char* family_;
  const char* kinds_[kMostKinds + 1] = {};  // those after the last are null
  const KernelBackend* next_ = nullptr;
};

// Base of a family's plans: what a backend wants to remember for the launch, a plain struct of its
// own.
template <size_t kBytes>
class PlanDetails {
 public:
  template <class Details>
  void set(const Details& details) {
    static_assert(std::is_trivially_copyable_v<Details> && sizeof(Details) <= kBytes);
    std::memcpy(details_, &details, sizeof(details));
  }
  template <class Details>
  Details get() const {
    Details details;
    std::memcpy(&details, details_, sizeof(details));
    return details;
  }

 private:
  alignas(8) unsigned char details_[kBytes];
};

// Compares an entry with the header that declares its one parameter, a struct of `bytes`:
// csrc/kernels/ matmul/matmul_params.h is "matmul", csrc/kernels/matmul/sm90_params.h
// "matmul/sm90". Two structs of one size differ in the digest alone. Throws [params].
void check_params(const KernelEntry& entry, const char* header, size_t bytes);

// The fields of an entry that its backend alone understands. Throws [file] where one is not as
// expected.
class KernelFields {
 public:
  explicit KernelFields(const PackageKernel& kernel);

  std::string text(const char* name) const;
  int64_t integer(const char* name, int64_t least, int64_t most = INT64_MAX) const;
  double number(const char* name, double least) const;
  double number(const char* name, double least, double otherwise) const;
  void triple(const char* name, int64_t least, int64_t (&out)[3]) const;

  // The index of a text among the names that the backend knows.
  template <size_t N>
  int index(const char* name, const char* const (&known)[N]) const {
    const std::string value = text(name);
    for (size_t i = 0; i < N; ++i) {
      if (value == known[i]) return static_cast<int>(i);
    }
    refuse(name, "a value that this library knows");
  }

  // The fields of the object that stands in a field; of none where there is no such field.
  KernelFields object(const char* name) const;

  // All fields, as the manifest has them.
  const nlohmann::json& all() const { return object_; }

  [[noreturn]] void refuse(const char* name, const std::string& expected) const;

 private:
  KernelFields(const std::string& kernel, const nlohmann::json& object)
      : kernel_(kernel), object_(object) {}
  const nlohmann::json& at(const char* name) const;

  const std::string& kernel_;
  const nlohmann::json& object_;
};

// The catalog's kernels of one family, of the arch that serves a device best.
class FamilyKernels {
 public:
  // Throws [arch] where the catalog has nothing for the device.
  FamilyKernels(const char* family, const Device& device);

  const std::string& arch() const { return arch_; }

  // Calls visit(backend, kernels) for each backend of the family, a `Backend`, that has kernels
  // which its check() lets pass.
  template <class Backend, class Visit>
  void for_each_backend(Visit&& visit) const {
    for (const auto& [backend, kernels] : backends_) {
      if (!kernels.empty()) visit(static_cast<const Backend&>(*backend), kernels);
    }
  }

  // The error for a problem without a kernel: that of an entry that was refused, else
  // [no_kernel].
  [[noreturn]] void fail_no_kernel(const std::string& problem) const;

 private:
  std::string arch_;
  std::vector<std::pair<const KernelBackend*, std::vector<PackageKernel*>>> backends_;
  std::string tag_, message_;  // of the first entry that was refused
};

// The catalog as Python shows it: the manifest, "path", "archs", "loaded", and "refused" [{"name",
// "arch", "message"}]: the entries that no backend takes.
nlohmann::json catalog_with_refused();

}  // namespace torch_cubin
