// The C API behind torch_cubin's Python (_native/library.py, by ctypes) and for C++-only users.
// The library uses no Python C API, so one file serves every Python.
//
// Functions that return char* give a malloc'd JSON object that the caller passes to
// torch_cubin_free (csrc/c_answer.h). Modules and launches are in c_api_modules.cpp.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "c_answer.h"
#include "cubin/error.h"
#include "cubin/inspect.h"
#include "ops/common/backend.h"
#include "ops/common/batch_invariant.h"
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

}  // namespace
}  // namespace torch_cubin

using namespace torch_cubin;

// What a file's bytes hold: {"file": {...}} (cubin/inspect.h). Never touches the driver.
TORCH_CUBIN_API char* torch_cubin_inspect(const uint8_t* data, size_t size, const char* origin) {
  return answer([&] {
    if (size > 0) given(data, "file");
    return "{\"file\": " + inspect_to_json(data, size, origin != nullptr ? origin : "bytes") + "}";
  });
}

// The catalog's manifest with "path", "archs", "loaded" and "refused" added. Never touches the
// driver.
TORCH_CUBIN_API char* torch_cubin_catalog() {
  return answer([] { return catalog_with_refused(); });
}

// What the runtime knows of a device, and the arch that the catalog serves it with.
TORCH_CUBIN_API char* torch_cubin_device(int index) {
  return answer([&] { return device_json(index); });
}

// For the Python kernels and fakes below a public op: keeps the text of the error that they are
// about to raise, which PyTorch's C API would lose on the way up (torch_cubin/_ops/checks.py calls
// it).
TORCH_CUBIN_API void torch_cubin_keep_error(const char* message) {
  try {
    fail_with_text("internal", message != nullptr ? message : "");
  } catch (const Error&) {
    // Thrown only to be kept: the caller raises it again in Python.
  }
}

TORCH_CUBIN_API void torch_cubin_free(char* text) { std::free(text); }

// Switches batch invariance of this thread (ops/common/batch_invariant.h) and returns what it was.
TORCH_CUBIN_API int torch_cubin_set_batch_invariant(int on) { return set_batch_invariant(on != 0); }

// Kernels launched by this process so far.
TORCH_CUBIN_API int64_t torch_cubin_launches() { return launch_count(); }
