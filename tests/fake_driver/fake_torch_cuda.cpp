// A stand-in libtorch_cuda.so: the symbols that the library asks of it, where PyTorch is a CPU
// build. The current stream of device i is 0x5000 + i; if so asked, null, the default stream, or
// 0x5040 + i, which PyTorch did not make.
// PyTorch's products compute nothing, and are counted. Its norms throw.
#include <cstdint>
#include <stdexcept>

#define EXPORTED extern "C" __attribute__((visibility("default")))

static bool g_default_streams = false, g_external = false;

EXPORTED void fake_default_streams(int yes) { g_default_streams = yes != 0; }

EXPORTED int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  const auto own = static_cast<uintptr_t>((g_external ? 0x5040 : 0x5000) + device);
  *stream = g_default_streams ? nullptr : reinterpret_cast<void*>(own);
  return 0;
}

EXPORTED void fake_external_streams(int yes) { g_external = yes != 0; }

// The id of a stream that PyTorch did not make is its handle.
EXPORTED int32_t aoti_torch_get_current_stream(int32_t device, void** stream) {
  *stream = new int32_t(device);
  return 0;
}

EXPORTED int32_t aoti_torch_stream_id(void* stream, int64_t* id) {
  const int32_t device = *static_cast<int32_t*>(stream);
  *id = g_external ? 0x5040 + device : 3;
  return 0;
}

EXPORTED int32_t aoti_torch_delete_stream(void* stream) {
  delete static_cast<int32_t*>(stream);
  return 0;
}

static int g_products = 0;

EXPORTED int fake_products() { return g_products; }

#define FAKE_PRODUCT(name)                                            \
  EXPORTED int32_t aoti_torch_cuda_##name(void*, void*, void*, ...) { \
    ++g_products;                                                     \
    return 0;                                                         \
  }
FAKE_PRODUCT(mm_out)
FAKE_PRODUCT(bmm_out)
FAKE_PRODUCT(addmm_out)
FAKE_PRODUCT(baddbmm_out)

// Its result would have to be made.
EXPORTED int32_t aoti_torch_cuda_addmv(void*, void*, void*, double, double, void**) { return 1; }

#define FAKE_NORM(symbol) \
  EXPORTED void symbol() { throw std::runtime_error("PyTorch's own norm was called"); }
FAKE_NORM(_ZN2at4cuda17native_layer_normERKNS_6TensorEN3c108ArrayRefIlEERKSt8optionalIS1_ESA_d)
FAKE_NORM(
    _ZN2at4cuda26native_layer_norm_backwardERKNS_6TensorES3_N3c108ArrayRefIlEES3_S3_RKSt8optionalIS1_ESA_St5arrayIbLm3EE)
FAKE_NORM(_ZN2at4cuda15_fused_rms_normERKNS_6TensorEN3c108ArrayRefIlEERKSt8optionalIS1_ES7_IdE)
FAKE_NORM(
    _ZN2at4cuda24_fused_rms_norm_backwardERKNS_6TensorES3_N3c108ArrayRefIlEES3_RKSt8optionalIS1_ESt5arrayIbLm2EE)
