#include "pytorch/internals.h"

#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "driver/dl.h"

namespace torch_cubin {
namespace {

struct Internal {
  const char* library;
  const char* symbol;
  const char* feature;
  const char* without;
};

constexpr const char* kCpu = "libtorch_cpu.so";
constexpr const char* kSettings = "TF32 where PyTorch's settings allow it";
constexpr const char* kIeee = "float32 products never use TF32";
constexpr const char* kProducts = "install() and drop_in() below autograd";
constexpr const char* kNotInstalled = "install() serves no product";
constexpr const char* kOutOfMemory = "torch.OutOfMemoryError of calls that install() serves";
constexpr const char* kRuntimeError = "it is a RuntimeError";
// Every build of PyTorch exports these. They are looked up in the CUDA build's library, so that a
// CPU build, which has no current stream of a GPU, counts as one without them.
#define TC_STREAM(symbol)                                                 \
  {"libtorch_cuda.so", symbol, "kernels that begin before the last ends", \
   "they begin when it has ended"}
#define TC_ATEN_PRODUCT(library, device, name) \
  {library, "aoti_torch_" device "_" name, kProducts, kNotInstalled}
#define TC_ATEN_PRODUCTS(library, device)                                                  \
  TC_ATEN_PRODUCT(library, device, "mm_out"), TC_ATEN_PRODUCT(library, device, "bmm_out"), \
      TC_ATEN_PRODUCT(library, device, "addmm_out"),                                       \
      TC_ATEN_PRODUCT(library, device, "baddbmm_out"), TC_ATEN_PRODUCT(library, device, "addmv")
#define TC_ATEN_ATTENTION(name)                                     \
  {"libtorch_cuda.so", "aoti_torch_cuda__scaled_dot_product_" name, \
   "install() of scaled_dot_product_attention", "PyTorch's kernels compute it"}
#define TC_ATEN_PACKED(name, torch)                              \
  {"libtorch_cuda.so", "aoti_torch_cuda__flash_attention_" name, \
   "install() of attention of packed sequences" torch, "PyTorch's kernels compute it"}
#define TC_ATEN_SCALED(library, device)                                                  \
  {library, "aoti_torch_" device "__scaled_mm", "install() of products of 8-bit floats", \
   "PyTorch's kernels compute them"}
// Symbols of pytorch/aten_norms.cpp.
#define TC_ATEN_NORM(library, device, name) \
  {library, "_ZN2at" device name, "install() of norms", "PyTorch's kernels compute them"}
#define TC_ATEN_LAYER_NORMS(library, device)                                                    \
  TC_ATEN_NORM(library, device,                                                                 \
               "17native_layer_normERKNS_6TensorEN3c108ArrayRefIlEERKSt8optionalIS1_ESA_d"),    \
      TC_ATEN_NORM(library, device,                                                             \
                   "26native_layer_norm_backwardERKNS_6TensorES3_N3c108ArrayRefIlEES3_S3_RKSt8" \
                   "optionalIS1_ESA_St5arrayIbLm3EE")
#define TC_OF_NAME "ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"

constexpr Internal kInternals[] = {
    {"libtorch_cuda.so", "aoti_torch_get_current_cuda_stream", "PyTorch's current stream",
     "nothing runs on a GPU"},
    TC_STREAM("aoti_torch_get_current_stream"),
    TC_STREAM("aoti_torch_stream_id"),
    TC_STREAM("aoti_torch_delete_stream"),
    {kCpu, "_ZN2at13globalContextEv", kSettings, kIeee},
    {kCpu, "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE", kSettings,
     kIeee},
    {kCpu, "_ZN2at11str2backend" TC_OF_NAME, kSettings, kIeee},
    {kCpu, "_ZN2at6str2op" TC_OF_NAME, kSettings, kIeee},
    {kCpu, "_ZN2at13str2precision" TC_OF_NAME, kSettings, kIeee},
    {kCpu, "_ZNK2at7Context23deterministicAlgorithmsEv", "the calibration of GPUs",
     "only GPUs that were measured before are served by the policy fastest"},
    {kCpu, "_ZN5torch8autograd14ForwardADLevel14try_get_by_idxEm",
     "forward mode under no_grad, and its refusal by declared ops", "a tangent is lost there"},
    {"libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv",
     "declared ops without a backward, called where nothing requires grad",
     "they refuse each call in grad mode"},
    {kCpu, "_ZN2at9functorch20getDynamicLayerStackEv",
     "products in grad mode of which no gradient is taken", "they take longer on the host"},
    {kCpu, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
     "declared ops that change an argument", "they raise InternalError"},
    {"libc10.so", "_ZN3c106detail19maybe_wrap_dim_slowIlEET_S2_S2_b",
     "IndexError of sums over wrong dims, with install()", "it is a RuntimeError"},
    {"libc10.so",
     "_ZN3c105ErrorC1ENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESt10shared_ptrIKNS_"
     "9LazyValueIS6_EEEPKv",
     kOutOfMemory, kRuntimeError},
    // Not in libc10.so of torch 2.11; the lookup goes through what a library depends on.
    {"libtorch_python.so", "_ZTIN3c1016OutOfMemoryErrorE", kOutOfMemory, kRuntimeError},
    {kCpu, "torch_exception_get_what_without_backtrace", "the reason of a failed allocation",
     "it is taken for a lack of memory"},
    TC_ATEN_PRODUCTS("libtorch_cuda.so", "cuda"),
    TC_ATEN_SCALED("libtorch_cuda.so", "cuda"),
    TC_ATEN_ATTENTION("flash_attention"),
    TC_ATEN_ATTENTION("flash_attention_backward"),
    TC_ATEN_ATTENTION("efficient_attention"),
    TC_ATEN_ATTENTION("efficient_attention_backward"),
    TC_ATEN_ATTENTION("cudnn_attention"),
    TC_ATEN_ATTENTION("cudnn_attention_backward"),
    TC_ATEN_PACKED("forward", ""),
    TC_ATEN_PACKED("forward_v2", " on torch 2.12 and newer"),
    TC_ATEN_PACKED("forward_no_dropout_inplace_v2", " on torch 2.12 and newer"),
    TC_ATEN_PACKED("backward", ""),
    TC_ATEN_LAYER_NORMS("libtorch_cuda.so", "4cuda"),
    TC_ATEN_NORM("libtorch_cuda.so", "4cuda",
                 "15_fused_rms_normERKNS_6TensorEN3c108ArrayRefIlEERKSt8optionalIS1_ES7_IdE"),
    TC_ATEN_NORM("libtorch_cuda.so", "4cuda",
                 "24_fused_rms_norm_backwardERKNS_6TensorES3_N3c108ArrayRefIlEES3_RKSt8"
                 "optionalIS1_ESt5arrayIbLm2EE"),
    TC_ATEN_PRODUCTS(kCpu, "cpu"),
    TC_ATEN_SCALED(kCpu, "cpu"),
    TC_ATEN_LAYER_NORMS(kCpu, "3cpu"),
    {kCpu, "_ZN2at4impl24ThreadLocalPythonObjects8contains" TC_OF_NAME,
     "drop_in() around backward() on a GPU", "PyTorch's kernels compute the gradients"},
    {kCpu, "_ZN2at4impl24ThreadLocalPythonObjects3get" TC_OF_NAME,
     "drop_in() around backward() on a GPU", "PyTorch's kernels compute the gradients"},
    {kCpu,
     "_ZN2at4impl24ThreadLocalPythonObjects3set" TC_OF_NAME "St10shared_ptrIN3c1012SafePyObjectEE",
     "drop_in() around backward() on a GPU", "PyTorch's kernels compute the gradients"},
};

// Whether a test simulates that this symbol is missing.
bool taken_away(const char* symbol) {
  static const char* const names = std::getenv("TORCH_CUBIN_TEST_MISSING");
  if (names == nullptr) return false;
  const size_t length = std::strlen(symbol);
  for (const char* at = names; (at = std::strstr(at, symbol)) != nullptr; at += length) {
    const bool begins = at == names || at[-1] == ' ';
    if (begins && (at[length] == ' ' || at[length] == '\0')) return true;
  }
  return false;
}

void* look_up(const Internal& internal) {
  void* library = dl_loaded(internal.library);
  if (library == nullptr || taken_away(internal.symbol)) return nullptr;
  return dl_symbol(library, internal.symbol);
}

}  // namespace

void* pytorch_symbol(const char* symbol) {
  for (const Internal& internal : kInternals) {
    if (std::strcmp(internal.symbol, symbol) == 0) return look_up(internal);
  }
  fail({"internal", "pytorch_symbol", "does not know the symbol",
        "one of csrc/pytorch/internals.cpp", symbol, ""});
}

std::string pytorch_symbols_json() {
  nlohmann::json symbols = nlohmann::json::array();
  for (const Internal& internal : kInternals) {
    nlohmann::json entry = {{"name", internal.symbol},
                            {"library", internal.library},
                            {"feature", internal.feature},
                            {"without", internal.without},
                            {"found", nullptr}};
    if (dl_loaded(internal.library) != nullptr) entry["found"] = look_up(internal) != nullptr;
    symbols.push_back(std::move(entry));
  }
  return nlohmann::json{{"symbols", std::move(symbols)}}.dump();
}

}  // namespace torch_cubin
