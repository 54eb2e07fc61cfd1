// The C API behind torch_cubin's Python (_native/library.py, by ctypes) and for C++-only users.
// The library uses no Python C API, so one file serves every Python.
//
// Functions that return char* return a malloc'd JSON object, which the caller frees with
// torch_cubin_free (csrc/c_answer.h). Modules and launches are in c_api_modules.cpp.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <nlohmann/json.hpp>
#include <vector>

#include "c_answer.h"
#include "cubin/error.h"
#include "ops/common/backend.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/op_calls.h"
#include "package/catalog.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

json device_json(int index) {
  const Device& d = device(index);
  json out = {{"index", d.index},
              {"name", d.name},
              {"sm", d.sm},
              {"multiprocessors", d.multiprocessors},
              {"shared_optin", d.shared_optin},
              {"driver", driver_version()},
              {"arch", nullptr}};
  try {
    out["arch"] = catalog().arch_for(d);
  } catch (const Error& error) {
    out["arch_error"] = {{"tag", error.tag()}, {"message", error.what()}};
  }
  return out;
}

void* copy_bytes(const std::vector<uint8_t>& bytes) {
  void* copy = std::malloc(bytes.size());
  if (copy == nullptr) throw std::bad_alloc();
  return std::memcpy(copy, bytes.data(), bytes.size());
}

}  // namespace
}  // namespace torch_cubin

using namespace torch_cubin;

// The catalog's manifest with "path", "archs", "loaded" and "refused" added. Never touches the
// driver.
TORCH_CUBIN_API char* torch_cubin_catalog() {
  return answer([] { return catalog_with_refused(); });
}

// Sets `bytes` to a copy of a kernel's cubin, which the caller frees with torch_cubin_free, and
// `size` to its size. Never touches the driver.
TORCH_CUBIN_API char* torch_cubin_catalog_cubin(const char* name, const char* arch, void** bytes,
                                                size_t* size) {
  return answer([&] {
    const auto cubin = catalog_cubin(given(name, "name"), given(arch, "arch"));
    *given(bytes, "address") = copy_bytes(cubin);
    *given(size, "size") = cubin.size();
  });
}

// A device's attributes, and the arch of the catalog's kernels for it.
TORCH_CUBIN_API char* torch_cubin_device(int index) {
  return answer([&] { return device_json(index); });
}

// For Python kernels and fakes below a public op (torch_cubin/_ops/checks.py): stores the text of
// the error that they are about to raise, because PyTorch's C API would lose it.
TORCH_CUBIN_API void torch_cubin_keep_error(const char* message) {
  try {
    fail_with_text("internal", message != nullptr ? message : "");
  } catch (const Error&) {
    // Thrown only so that fail() stores the text; the caller raises the error in Python.
  }
}

TORCH_CUBIN_API void torch_cubin_free(char* text) { std::free(text); }

// Batch invariance (ops/common/batch_invariant.h): the state of this thread's calls, this thread's
// own (the previous one is returned), and the process's.
TORCH_CUBIN_API int torch_cubin_batch_invariant() { return batch_invariant(); }
TORCH_CUBIN_API int torch_cubin_set_batch_invariant(int state) {
  return set_batch_invariant(state);
}
TORCH_CUBIN_API void torch_cubin_set_process_batch_invariant(int on) {
  set_process_batch_invariant(on != 0);
}
TORCH_CUBIN_API void torch_cubin_set_process_keeps_k_whole(int on) {
  set_process_keeps_k_whole(on != 0);
}

// {"calls": [...]}: how often each op ran (ops/common/op_calls.h) since `clear` was last set.
TORCH_CUBIN_API char* torch_cubin_op_calls(int clear) {
  return answer([&] { return json{{"calls", op_calls(clear != 0)}}; });
}

// The number of kernels that this process has launched.
TORCH_CUBIN_API int64_t torch_cubin_launches() { return launch_count(); }
