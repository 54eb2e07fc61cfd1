// The C API of declared ops and packages, for Python (_native/library.py) and for C++ programs.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "c_answer.h"
#include "cubin/error.h"
#include "declared/contract.h"
#include "declared/declared_package.h"
#include "declared/slots.h"
#include "package/load_error.h"

using namespace torch_cubin;
using nlohmann::json;

namespace {

// Runs before main, or when the library is loaded into a running process.
const bool g_packages_loaded = [] {
  load_packages_of_environment();
  return true;
}();

json ops_json(json ops) { return {{"ops", std::move(ops)}}; }

}  // namespace

// Registers all ops of {"version": 1, "ops": [CONTRACT, ...]} (docs/manifest.md), or none. Their
// kernels refer to the images by index; origins[i] names image i in errors. Returns {"ops":
// [{"name", "schema", "state", "contract", "package", "images"}]}. The state is "defined", "same"
// (an identical op existed) or "swapped" (it replaced another contract); package and images are
// null.
TORCH_CUBIN_API char* torch_cubin_define_ops(const char* text, const uint8_t* const* data,
                                             const size_t* sizes, const char* const* origins,
                                             size_t count) {
  return answer([&] {
    ContractImages images;
    for (size_t i = 0; i < count; ++i) {
      const uint8_t* const bytes = given(given(data, "list of files")[i], "file");
      const size_t size = given(sizes, "list of sizes")[i];
      images.add({bytes, bytes + size}, given(given(origins, "list of names")[i], "name"));
    }
    return ops_json(define_ops(given(text, "definition"), images));
  });
}

// {}, or the error of a schema that declared ops do not support (`differentiable`: with a
// derivative).
TORCH_CUBIN_API char* torch_cubin_check_schema(const char* text, bool differentiable) {
  return answer([&] {
    const Schema schema = parse_schema(given(text, "schema"));
    check_schema(schema);
    if (differentiable) check_differentiable(schema);
  });
}

// The same for a package. Each op's "package" is its resolved path, and "images" are its files
// [{"file", "sha256"}], null for a package inside a library. Never replaces an op. Programs without
// Python call this function (examples/aoti_runner), so its signature must not change.
TORCH_CUBIN_API char* torch_cubin_load_package(const char* folder) {
  return answer([&] { return ops_json(load_package(given(folder, "path"))); });
}

// The same for a package that must be signed by one of the public keys in a JSON list
// (package/signature.h).
TORCH_CUBIN_API char* torch_cubin_load_signed_package(const char* folder, const char* trusted) {
  return answer([&] {
    Trust trust;
    trust.keys = json::parse(given(trusted, "keys")).get<std::vector<std::string>>();
    return ops_json(load_package(given(folder, "path"), trust));
  });
}

// {"ops": [{"name", "schema", "contract", "package", "images"}]}: all declared ops of this process.
TORCH_CUBIN_API char* torch_cubin_ops() {
  return answer([] { return ops_json(declared_ops()); });
}

// {}, or the first error from loading TORCH_CUBIN_PACKAGES. Later calls of ops do not raise it
// again.
TORCH_CUBIN_API char* torch_cubin_packages_error() {
  return answer([] {
    std::string tag, message;
    if (take_load_error(&tag, &message)) return error_json(tag, message);
    return std::string("{}");
  });
}

// {"outputs": [...]} of the call {"op": name, "arguments": {...}} of a declared op, or its error
// (Contract::check_call in declared/contract.h). Never touches the driver.
TORCH_CUBIN_API char* torch_cubin_check_call(const char* text) {
  return answer([&] {
    const json call = json::parse(given(text, "call"));
    const Contract& contract = find_contract(call.at("op").get<std::string>());
    return json{{"outputs", contract.check_call(call.at("arguments"))}};
  });
}

// Loads an op's kernels onto a device now instead of at its first call.
TORCH_CUBIN_API char* torch_cubin_preload_op(const char* name, int index) {
  return answer([&] { find_contract(given(name, "name")).preload(device(index)); });
}

// For torch_cubin/torch.h: 0, or 1 with the error's text, which is valid until this thread's next
// error.
TORCH_CUBIN_API int torch_cubin_v1_torch_load_package(const char* folder, const char** text) {
  try {
    load_package(folder);
    return 0;
  } catch (const Error&) {
    *text = last_error().c_str();
  } catch (...) {
    *text = "torch_cubin [internal]: the package could not be loaded.";
  }
  return 1;
}

// The text of this thread's last error, which PyTorch's C API loses below torch 2.13. `clear`
// resets it.
TORCH_CUBIN_API const char* torch_cubin_v1_torch_last_error(int clear) {
  if (clear != 0) clear_last_error();
  return last_error().c_str();
}
