// The C ABI of devices, memory and tensor maps.
#include <cstddef>
#include <cstring>

#include "abi/handles.h"
#include "abi/structs.h"
#include "runtime/device_memory.h"
#include "runtime/memory.h"
#include "runtime/tensor_map.h"

using namespace torch_cubin;

torch_cubin_v1_error* torch_cubin_v1_tensor_map(const struct torch_cubin_v1_tensor_map_spec* given,
                                                void* out) {
  return guarded([&] {
    const auto map = from_caller(given);
    if (map.rank < 1 || map.rank > kTensorMapDims) {
      fail({"input", "a tensor map", "has a wrong number of dims",
            "1 to " + std::to_string(kTensorMapDims), std::to_string(map.rank), ""});
    }
    TensorMapSpec spec{};
    spec.rank = map.rank;
    spec.data_type = map.data_type;
    spec.interleave = map.interleave;
    spec.swizzle = map.swizzle;
    spec.l2_promotion = map.l2_promotion;
    spec.oob_fill = map.oob_fill;
    spec.device = device_of(map.device).index;
    spec.address = map.address;
    std::memcpy(spec.dims, map.dims, sizeof(spec.dims));
    std::memcpy(spec.strides, map.strides, sizeof(spec.strides));
    std::memcpy(spec.box, map.box, sizeof(spec.box));
    std::memcpy(spec.element_strides, map.element_strides, sizeof(spec.element_strides));
    encode_tensor_map(spec, static_cast<uint8_t*>(out));
  });
}

torch_cubin_v1_error* torch_cubin_v1_device_count(int32_t* out) {
  return guarded([&] { *out = device_count(); });
}

torch_cubin_v1_error* torch_cubin_v1_device_info(int32_t index, struct torch_cubin_v1_device* out) {
  return guarded([&] {
    const Device& found = device_of(index);
    struct torch_cubin_v1_device made{};
    made.index = found.index;
    made.capability = found.sm;
    made.multiprocessors = found.multiprocessors;
    made.max_shared_memory = found.shared_optin;
    std::strncpy(made.name, found.name.c_str(), sizeof(made.name) - 1);
    to_caller(made, out);
  });
}

torch_cubin_v1_error* torch_cubin_v1_set_device(int32_t index) {
  return guarded([&] { set_current_device(index); });
}

void torch_cubin_v1_set_release_cache(void (*release)(int32_t device)) {
  set_release_cache(release);
}

torch_cubin_v1_error* torch_cubin_v1_allocate(int32_t index, uint64_t bytes, void** out) {
  return guarded([&] { *out = allocate_memory(device_of(index), bytes); });
}

torch_cubin_v1_error* torch_cubin_v1_deallocate(int32_t index, void* memory) {
  return guarded([&] { free_memory(device_of(index), memory); });
}

torch_cubin_v1_error* torch_cubin_v1_copy(int32_t index, void* to, const void* from, uint64_t bytes,
                                          void* stream) {
  return guarded([&] { copy_memory(device_of(index), to, from, bytes, stream); });
}

torch_cubin_v1_error* torch_cubin_v1_synchronize(int32_t index, void* stream) {
  return guarded([&] { synchronize_stream(device_of(index), stream); });
}
