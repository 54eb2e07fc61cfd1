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

// Before main, or when the library is loaded into a running process.
const bool g_packages_loaded = [] {
  load_packages_of_environment();
  return true;
}();

json ops_json(json ops) { return {{"ops", std::move(ops)}}; }

}  // namespace

// Registers the ops of {"version": 1, "ops": [CONTRACT, ...]} (docs/manifest.md), whose kernels name
// the images by index; origins[i] names image i in errors. {"ops": [{"name", "schema", "state",
// "contract", "package", "images"}]}, the state being "defined", "same" (there already) or "swapped"
// (another contract before), the package and its images null. All or none.
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

// {}, or the error of a schema that no declared op can have, or none with a derivative.
TORCH_CUBIN_API char* torch_cubin_check_schema(const char* text, bool differentiable) {
  return answer([&] {
    const Schema schema = parse_schema(given(text, "schema"));
    check_schema(schema);
    if (differentiable) check_differentiable(schema);
  });
}

// The same of a package, whose path without links is each op's "package", and whose files are its
// "images": [{"file", "sha256"}], null for those in a library. It swaps nothing.
// Programs without Python call it (examples/aoti_runner), so that it keeps its one argument.
TORCH_CUBIN_API char* torch_cubin_load_package(const char* folder) {
  return answer([&] { return ops_json(load_package(given(folder, "path"))); });
}

// The same of one that must be signed by one of the public keys of a JSON list (package/signature.h).
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

// {}, or the first error of TORCH_CUBIN_PACKAGES, which then no call raises any more.
TORCH_CUBIN_API char* torch_cubin_packages_error() {
  return answer([] {
    std::string tag, message;
    if (take_load_error(&tag, &message)) return error_json(tag, message);
    return std::string("{}");
  });
}

// {"outputs": [...]} of a call of a declared op, {"op": name, "arguments": {...}}, or the error that it
// raises (Contract::check_call in declared/contract.h). Never touches the driver.
TORCH_CUBIN_API char* torch_cubin_check_call(const char* text) {
  return answer([&] {
    const json call = json::parse(given(text, "call"));
    const Contract& contract = find_contract(call.at("op").get<std::string>());
    return json{{"outputs", contract.check_call(call.at("arguments"))}};
  });
}

// Loads an op's kernels onto a device now, rather than at its first call.
TORCH_CUBIN_API char* torch_cubin_preload_op(const char* name, int index) {
  return answer([&] { find_contract(given(name, "name")).preload(device(index)); });
}

// For torch_cubin/torch.h, on a program's way from C++ to C++: 0, or 1 with the error's text, which lives
// until this thread's next error.
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

// What the last error of this thread said, which PyTorch's C API loses below torch 2.13; with `clear`
// it is forgotten.
TORCH_CUBIN_API const char* torch_cubin_v1_torch_last_error(int clear) {
  if (clear != 0) clear_last_error();
  return last_error().c_str();
}
