// The C API of torch_cubin.load(): modules, kernels, launches (_kernels/module.py). A handle is
// the address of a Module or Kernel; a kernel lives as long as its module.
#include <cstdint>
#include <nlohmann/json.hpp>

#include "c_answer.h"
#include "cubin/ptx.h"
#include "declared/tensor_map_argument.h"
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

template <class T>
void check_build(const T& value) {
  if (value.size == sizeof(T)) return;
  fail({"internal", "the caller", "is of another build than the library",
        std::to_string(sizeof(T)) + " bytes", std::to_string(value.size),
        "Build torch_cubin again: `make build`."});
}

}  // namespace

// Opens a module from the bytes of one or more files: {"handle": ..., "images": [...], "places":
// [...]}, the places being where each image's bytes are until it is loaded. Never touches the
// driver.
TORCH_CUBIN_API char* torch_cubin_module_open(const uint8_t* const* data, const size_t* sizes,
                                              const char* const* origins, size_t count,
                                              const char* origin, int jit) {
  return answer([&] {
    std::vector<SourceImage> images;
    for (size_t i = 0; i < count; ++i) {
      const uint8_t* const bytes = given(given(data, "list of files")[i], "file");
      const char* const name = given(given(origins, "list of names")[i], "name");
      append_source(images_of(bytes, given(sizes, "list of sizes")[i], name, jit != 0), images);
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

// {"handle": ...} of a kernel.
TORCH_CUBIN_API char* torch_cubin_module_kernel(void* module, const char* name, size_t size) {
  return answer([&] {
    return json{{"handle", handle_json(&module_of(module).kernel(name_of(name, size)))}};
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

// For csrc/python_launch.c: 1, with device and address, for a contiguous tensor with memory; else
// 0.
TORCH_CUBIN_API __attribute__((hot)) int torch_cubin_read_tensor(const void* tensor,
                                                                 int32_t* device,
                                                                 uint64_t* address) {
  if (tensor == nullptr) return 0;
  try {
    const auto handle = static_cast<AtenTensorHandle>(const_cast<void*>(tensor));
    return read_contiguous(handle, device, address);
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
