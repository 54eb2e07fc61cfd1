// The C ABI of modules.
#include "abi/handles.h"
#include "package/open_images.h"
#include "package/user_images.h"

using namespace torch_cubin;

namespace {

// Keeps modules whose last reference was dropped while they were loaded: a CUDA graph or a pending
// launch may need them until the process ends. The list is leaked on purpose.
void keep_forever(torch_cubin_v1_module* module) {
  static auto* const mutex = new std::mutex;  // guards the list
  static auto* const kept = new std::vector<torch_cubin_v1_module*>;
  std::lock_guard<std::mutex> lock(*mutex);
  kept->push_back(module);
}

torch_cubin_v1_module* open_module(std::vector<SourceImage> images, const std::string& origin,
                                   uint32_t flags) {
  const bool forever = (flags & TORCH_CUBIN_V1_FOREVER) != 0;
  return new torch_cubin_v1_module(std::move(images), origin,
                                   forever ? Lifetime::kUntilExit : Lifetime::kUntilUnload);
}

void check_flags(uint32_t flags) {
  if ((flags & ~(TORCH_CUBIN_V1_NO_PTX | TORCH_CUBIN_V1_FOREVER)) == 0) return;
  fail({"internal", "the flags of a module", "are not all known to this library",
        "those of its own abi.h", std::to_string(flags), "Use a newer libtorch_cubin."});
}

std::unique_ptr<torch_cubin_v1_kernel> wrapped(Kernel& kernel) {
  auto made = std::make_unique<torch_cubin_v1_kernel>();
  made->kernel = &kernel;
  made->filled = filled_notes(kernel);
  const std::vector<ParamInfo>& params = kernel.info().params;
  const size_t hidden = made->filled == nullptr ? 0 : made->filled->hidden;
  for (size_t i = 0; i + hidden < params.size(); ++i) {
    const ParamInfo& param = params[i];
    const uint32_t kind = param.kind == ParamKind::kPointer ? TORCH_CUBIN_V1_POINTER
                          : param.kind == ParamKind::kValue ? TORCH_CUBIN_V1_VALUE
                                                            : TORCH_CUBIN_V1_ANY;
    made->params.push_back({param.size, kind});
    const StatedType& stated = param.stated;
    const bool is_value = kind == TORCH_CUBIN_V1_VALUE;
    const bool is_checked = stated.takes != 0 && stated.is_pointer != is_value;
    made->takes.push_back(is_checked ? stated.takes << 1 | 1 : ~uint64_t{0});
  }
  return made;
}

}  // namespace

torch_cubin_v1_error* torch_cubin_v1_module_open(const torch_cubin_v1_image* images, uint64_t count,
                                                 const char* origin, uint32_t flags,
                                                 torch_cubin_v1_module** out) {
  return guarded([&] {
    *out = nullptr;
    check_flags(flags);
    std::vector<SourceImage> all;
    std::string first = "a module of no images";
    for (uint64_t i = 0; i < count; ++i) {
      const std::string name = images[i].origin != nullptr ? images[i].origin : "bytes";
      if (i == 0) first = name;
      const bool jit = (flags & TORCH_CUBIN_V1_NO_PTX) == 0;
      append_source(images_in_memory(images[i].data, images[i].size, name, jit), all);
    }
    *out = open_module(std::move(all), origin != nullptr ? origin : first, flags);
  });
}

torch_cubin_v1_error* torch_cubin_v1_module_open_files(const char* const* paths, uint64_t count,
                                                       uint32_t flags,
                                                       torch_cubin_v1_module** out) {
  return guarded([&] {
    *out = nullptr;
    check_flags(flags);
    std::vector<SourceImage> all;
    std::string first = "a module of no files";
    for (uint64_t i = 0; i < count; ++i) {
      if (i == 0) first = "file '" + printable(paths[i], 4096) + "'";
      const bool jit = (flags & TORCH_CUBIN_V1_NO_PTX) == 0;
      append_source(images_at_path(paths[i], jit), all);
    }
    *out = open_module(std::move(all), first, flags);
  });
}

void torch_cubin_v1_module_retain(torch_cubin_v1_module* module) {
  if (module != nullptr) module->references.fetch_add(1, std::memory_order_relaxed);
}

void torch_cubin_v1_module_release(torch_cubin_v1_module* module) {
  if (module == nullptr || module->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (!module->module.loaded()) {
    delete module;
    return;
  }
  try {
    keep_forever(module);
  } catch (...) {
    // Out of memory: the module is leaked without a list entry.
  }
}

const char* torch_cubin_v1_module_kernel_name(torch_cubin_v1_module* module, uint64_t index) {
  return index < module->names.size() ? module->names[index].c_str() : nullptr;
}

torch_cubin_v1_error* torch_cubin_v1_module_kernel(torch_cubin_v1_module* module, const char* name,
                                                   uint64_t size, torch_cubin_v1_kernel** out) {
  return guarded([&] {
    *out = nullptr;
    Kernel& kernel = module->module.kernel_called({name, static_cast<size_t>(size)});
    std::lock_guard<std::mutex> lock(module->mutex);
    std::unique_ptr<torch_cubin_v1_kernel>& handle = module->kernels[&kernel];
    if (handle == nullptr) handle = wrapped(kernel);
    *out = handle.get();
  });
}

torch_cubin_v1_error* torch_cubin_v1_module_global(torch_cubin_v1_module* module, int32_t index,
                                                   const char* name, uint64_t size,
                                                   uint64_t* address, uint64_t* bytes) {
  return guarded([&] {
    const Module::Global global =
        module->module.global(device_of(index), {name, static_cast<size_t>(size)});
    *address = global.address;
    *bytes = global.bytes;
  });
}

torch_cubin_v1_error* torch_cubin_v1_module_preload(torch_cubin_v1_module* module, int32_t index) {
  return guarded([&] { module->module.preload(device_of(index)); });
}

torch_cubin_v1_error* torch_cubin_v1_module_unload(torch_cubin_v1_module* module, int32_t keep,
                                                   int32_t* unloaded) {
  return guarded([&] { *unloaded = module->module.unload(keep != 0, nullptr) ? 1 : 0; });
}
