// The C API of torch_cubin.load(): modules, kernels, launches (_kernels/module.py). A handle is
// the address of a Module or Kernel; a kernel lives as long as its module.
#include <cstdint>
#include <nlohmann/json.hpp>

#include "c_answer.h"
#include "cubin/demangle.h"
#include "cubin/ptx.h"
#include "declared/tensor_map_argument.h"
#include "package/triton_notes.h"
#include "package/user_images.h"
#include "pytorch/stream.h"
#include "pytorch/tensor.h"
#include "runtime/launch.h"
#include "runtime/module.h"

using namespace torch_cubin;
using nlohmann::json;

namespace {

Module& module_of(void* handle) { return *static_cast<Module*>(given(handle, "module")); }
Kernel& kernel_of(void* handle) { return *static_cast<Kernel*>(given(handle, "kernel")); }

// A name that may contain any byte, NUL included.
std::string name_of(const char* name, size_t size) { return {given(name, "name"), size}; }

json handle_json(const void* object) { return reinterpret_cast<uintptr_t>(object); }

const char* number_name(Number number) {
  switch (number) {
    case Number::kAnyInteger:
      return "integer";
    case Number::kSigned:
      return "signed";
    case Number::kUnsigned:
      return "unsigned";
    case Number::kBool:
      return "bool";
    case Number::kFloat:
      return "float";
    case Number::kNone:
      return "none";
    case Number::kUnsaid:
      break;
  }
  return "";
}

json stated_json(const ParamInfo& param) {
  json dtypes = json::array();
  for (int i = 0; i < 64; ++i) {
    if (has_element(param.stated.takes, i)) dtypes.push_back(element_name(i));
  }
  return {{"kind", kind_name(param.kind)},
          {"type", param.stated.text},
          {"number", number_name(param.stated.number)},
          {"is_pointer", param.stated.is_pointer},
          {"takes", param.stated.takes},
          {"dtypes", std::move(dtypes)}};
}

template <class T>
void check_build(const T& value) {
  if (value.size == sizeof(T)) return;
  fail({"internal", "the caller", "is of another build than the library",
        std::to_string(sizeof(T)) + " bytes", std::to_string(value.size),
        "Build torch_cubin again: `make build`."});
}

}  // namespace

// {"cubin": ...}: the file of a path, which may be a folder of Triton's (package/triton_notes.h).
TORCH_CUBIN_API char* torch_cubin_cubin_at(const char* path) {
  return answer([&] { return json{{"cubin", cubin_at(given(path, "path"))}}; });
}

// Opens a module from the bytes of one or more files: {"handle": ..., "images": [...], "places":
// [...]}, the places being where each image's bytes are until it is loaded. Each file's path
// locates Triton's notes; it is "" for bytes alone. Never touches the driver.
TORCH_CUBIN_API char* torch_cubin_module_open(const uint8_t* const* data, const size_t* sizes,
                                              const char* const* origins, const char* const* paths,
                                              size_t count, const char* origin, int jit) {
  return answer([&] {
    std::vector<SourceImage> images;
    for (size_t i = 0; i < count; ++i) {
      const uint8_t* const bytes = given(given(data, "list of files")[i], "file");
      const char* const name = given(given(origins, "list of names")[i], "name");
      const char* const path = given(given(paths, "list of paths")[i], "path");
      std::vector<SourceImage> found =
          images_of(bytes, given(sizes, "list of sizes")[i], name, jit != 0);
      if (*path != '\0') add_triton_notes(path, found);
      append_source(std::move(found), images);
    }
    auto module = std::make_unique<Module>(std::move(images), given(origin, "name"));
    json out = {{"handle", handle_json(module.get())},
                {"images", json::array()},
                {"places", json::array()}};
    for (const SourceImage& source : module->images()) {
      out["images"].push_back(source.is_ptx ? to_json(parse_ptx(source.bytes.data(),
                                                                source.bytes.size(), source.origin))
                                            : to_json(source.image));
      out["places"].push_back({{"address", reinterpret_cast<uintptr_t>(source.bytes.data())},
                               {"bytes", source.bytes.size()},
                               {"origin", source.origin}});
    }
    const std::string text = dump(out);
    (void)module.release();  // the caller holds the handle now
    return text;
  });
}

// {"handle": ..., "name": its symbol, "params": [the facts that its files state of each], "filled":
// what launches get that callers do not pass, or null} of a kernel.
TORCH_CUBIN_API char* torch_cubin_module_kernel(void* module, const char* name, size_t size) {
  return answer([&] {
    Kernel& kernel = module_of(module).kernel_called(name_of(name, size));
    json params = json::array();
    for (const ParamInfo& param : kernel.info().params) params.push_back(stated_json(param));
    json filled;
    if (const LaunchNotes* notes = filled_notes(kernel)) {
      filled = {{"hidden", notes->hidden},
                {"shared_memory", notes->shared_memory},
                {"block", notes->threads},
                {"cooperative", notes->cooperative},
                {"programmatic_dependent_launch", notes->dependent}};
    }
    return json{{"handle", handle_json(&kernel)},
                {"name", kernel.name()},
                {"params", std::move(params)},
                {"filled", std::move(filled)}};
  });
}

// {"advice": ...}: runtime/launch_notes.h.
TORCH_CUBIN_API char* torch_cubin_hidden_advice(void* kernel, size_t count) {
  return answer([&] { return json{{"advice", hidden_advice(kernel_of(kernel), count)}}; });
}

// {"symbols": [...]}: which of the "symbols" in `text` are called "name" (cubin/demangle.h).
TORCH_CUBIN_API char* torch_cubin_symbols_called(const char* text) {
  return answer([&] {
    const json given_names = json::parse(given(text, "text"));
    return json{
        {"symbols", symbols_called(given_names.at("symbols").get<std::vector<std::string>>(),
                                   given_names.at("name").get<std::string>())}};
  });
}

// {"address": ..., "bytes": ...} of a global variable on a device.
TORCH_CUBIN_API char* torch_cubin_module_global(void* module, int index, const char* name,
                                                size_t size) {
  return answer([&] {
    const Module::Global global = module_of(module).global(device(index), name_of(name, size));
    return json{{"address", global.address}, {"bytes", global.bytes}};
  });
}

TORCH_CUBIN_API char* torch_cubin_module_preload(void* module, int index) {
  return answer([&] { module_of(module).preload(device(index)); });
}

TORCH_CUBIN_API char* torch_cubin_kernel_preload(void* kernel, int index) {
  return answer([&] { kernel_of(kernel).preload(device(index)); });
}

// {"unloaded": false} if a captured graph, or the caller, keeps the module loaded.
TORCH_CUBIN_API char* torch_cubin_module_unload(void* module, int keep) {
  return answer([&] {
    return json{{"unloaded", module_of(module).unload(keep != 0, current_stream_if_any())}};
  });
}

// Called when the Python object is destroyed. Loaded images stay loaded: only unload() unloads
// them.
TORCH_CUBIN_API void torch_cubin_module_drop(void* module) {
  if (module != nullptr && !module_of(module).loaded()) delete &module_of(module);
}

// Null, or the error. Python and csrc/python_launch.c call it for every launch.
TORCH_CUBIN_API __attribute__((hot)) char* torch_cubin_kernel_launch(
    void* kernel, const torch_cubin_launch_call* call) {
  try {
    check_build(*given(call, "call"));
    launch(kernel_of(kernel), *call, &current_stream);
    return nullptr;
  } catch (...) {
    return error_answer();
  }
}

// For csrc/python_launch.c: 1, with device and address, for a contiguous tensor with memory whose
// dtype is in `takes`, or of any where that is 0; else 0.
TORCH_CUBIN_API __attribute__((hot)) int torch_cubin_read_tensor(const void* tensor, uint64_t takes,
                                                                 int32_t* device,
                                                                 uint64_t* address) {
  if (tensor == nullptr) return 0;
  try {
    const auto handle = static_cast<AtenTensorHandle>(const_cast<void*>(tensor));
    return (takes == 0 || has_dtype(handle, takes)) && read_contiguous(handle, device, address);
  } catch (...) {
    return 0;  // the Python path raises the error
  }
}

// Encodes a tensor map into the 128 bytes at `out`, or only checks it if `out` is null. `text` is
// {"map": a contract's tensor map (docs/manifest.md), "dtype", "itemsize", "sizes", "strides",
// "address", "device"}.
TORCH_CUBIN_API char* torch_cubin_encode_tensor_map(const char* text, uint8_t* out) {
  return answer([&] {
    const json tensor = json::parse(given(text, "text"));
    const auto sizes = tensor.at("sizes").get<std::vector<int64_t>>();
    const auto strides = tensor.at("strides").get<std::vector<int64_t>>();
    const auto dtype = tensor.at("dtype").get<std::string>();
    const TensorFacts facts{sizes.data(),
                            strides.data(),
                            static_cast<int64_t>(sizes.size()),
                            tensor.at("itemsize").get<int64_t>(),
                            dtype.c_str(),
                            true};
    const TensorMapArgument map(tensor.at("map"), {{"tensor"}, {}, {}}, "a TensorMap");
    map.encode(facts, reinterpret_cast<void*>(tensor.at("address").get<uintptr_t>()),
               tensor.at("device").get<int32_t>(), {}, out);
  });
}

// {"device": ...}: the device of a CUDA address, for arrays that do not carry it; -1 for other
// memory.
TORCH_CUBIN_API char* torch_cubin_pointer_device(uint64_t address) {
  return answer([&] { return json{{"device", device_of_pointer(address)}}; });
}
