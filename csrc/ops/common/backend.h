// KernelBackend: the host side of one device file, in a host file of the same name. A family's own
// interface (ops/matmul/backend.h, ops/attention/plan/plan.h) adds which problems it supports,
// their predicted cost, and the launch.
//
// A new kernel is a device file, a host file and a table: the backend registers itself. A catalog
// entry that no backend supports is refused by itself; the others stay usable.
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
  // Constructed as a static object while the library is loaded, so it allocates nothing. `family`
  // and `kinds` select the manifest's entries of this device file; without kinds, all of the
  // family.
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

  // Whether this backend launches the kernel of an entry of the family. Several may.
  virtual bool owns(const KernelEntry& entry) const;

  // Throws if an entry that it owns is invalid: other parameters (check_params()), unreadable
  // fields.
  virtual void check(PackageKernel& kernel) const = 0;

  // All backends, in the order of their registration.
  static const KernelBackend* first();
  const KernelBackend* next() const { return next_; }

 private:
  static constexpr size_t kMostKinds = 8;
  const char* family_;
  const char* kinds_[kMostKinds + 1] = {};  // terminated by null
  const KernelBackend* next_ = nullptr;
};

// Base of a family's plans: holds a plain struct of the backend's own, which its launch reads.
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

// Throws [params] unless an entry was built with this header for its one parameter, a struct of
// `bytes`. `header` is "matmul" for csrc/kernels/matmul/matmul_params.h, "matmul/sm90" for
// sm90_params.h beside it. The header's digest detects changes that keep the size.
void check_params(const KernelEntry& entry, const char* header, size_t bytes);

// The fields of an entry that only its backend reads. Throws [file] if one is missing or invalid.
class KernelFields {
 public:
  explicit KernelFields(const PackageKernel& kernel);

  std::string text(const char* name) const;
  std::string text(const char* name, const char* otherwise) const;
  int64_t integer(const char* name, int64_t least, int64_t most = INT64_MAX) const;
  double number(const char* name, double least) const;
  double number(const char* name, double least, double otherwise) const;
  void triple(const char* name, int64_t least, int64_t (&out)[3]) const;

  // The index of the field's string in `known`: of strings, or of structs with a `name`.
  template <class Known, size_t N>
  int index(const char* name, const Known (&known)[N]) const {
    const std::string value = text(name);
    for (size_t i = 0; i < N; ++i) {
      if (value == name_of(known[i])) return static_cast<int>(i);
    }
    refuse(name, "a value that this library knows");
  }

  // The fields of a nested object; empty if the field is missing.
  KernelFields object(const char* name) const;

  // All fields of the manifest's entry.
  const nlohmann::json& all() const { return object_; }

  [[noreturn]] void refuse(const char* name, const std::string& expected) const;

 private:
  KernelFields(const std::string& kernel, const nlohmann::json& object)
      : kernel_(kernel), object_(object) {}
  const nlohmann::json& at(const char* name) const;
  static const char* name_of(const char* name) { return name; }
  template <class Named>
  static const char* name_of(const Named& named) {
    return named.name;
  }

  const std::string& kernel_;
  const nlohmann::json& object_;
};

// The catalog's kernels of one family, for the arch that fits the device best.
class FamilyKernels {
 public:
  // Throws [arch] if the catalog has no kernels for the device.
  FamilyKernels(const char* family, const Device& device);

  const std::string& arch() const { return arch_; }

  // Calls visit(backend, kernels) for each backend of the family with kernels that pass its
  // check().
  template <class Backend, class Visit>
  void for_each_backend(Visit&& visit) const {
    for (const auto& [backend, kernels] : backends_) {
      if (!kernels.empty()) visit(static_cast<const Backend&>(*backend), kernels);
    }
  }

  // Throws the error for a problem without a kernel: that of the first refused entry, else
  // [no_kernel].
  [[noreturn]] void fail_no_kernel(const std::string& problem) const;

 private:
  std::string arch_;
  std::vector<std::pair<const KernelBackend*, std::vector<PackageKernel*>>> backends_;
  std::string tag_, message_;  // of the first refused entry
};

// The backend of one device file whose host code sees a kernel as a Row, which is made of the entry
// and throws if a field of it is missing or invalid. `header` is as for check_params().
template <class Row, class Params>
class RowBackend : public KernelBackend {
 public:
  RowBackend(const char* header, const char* family) : KernelBackend(family), header_(header) {}
  template <size_t kKinds>
  RowBackend(const char* header, const char* family, const char* const (&kinds)[kKinds])
      : KernelBackend(family, kinds), header_(header) {}

  void check(PackageKernel& kernel) const override {
    check_params(kernel.entry(), header_, sizeof(Params));
    Row{kernel};
  }

  // Its kernels among those of a family.
  std::vector<Row> rows(const FamilyKernels& family) const {
    std::vector<Row> found;
    family.for_each_backend<KernelBackend>([&](const KernelBackend& backend, const auto& kernels) {
      if (&backend != this) return;
      for (PackageKernel* kernel : kernels) found.emplace_back(*kernel);
    });
    return found;
  }

 private:
  const char* header_;
};

// The catalog for Python: the manifest, "path", "archs", "loaded", and "refused", the entries that
// no backend supports: [{"name", "arch", "message"}].
nlohmann::json catalog_with_refused();

}  // namespace torch_cubin
