#include "pytorch/settings.h"

#include "driver/dl.h"

namespace torch_cubin {
namespace {

// Mirrors of ATen/Context.h; tests/gpu compare their effect with torch's on every torch we have.
enum class Float32Backend { kGeneric, kCuda, kMkldnn };
enum class Float32Op { kAll, kConv, kRnn, kMatmul };
constexpr int kTf32 = 2;  // at::Float32Precision::TF32

using GlobalContext = void* (*)();
using Float32Precision = int (*)(const void* context, Float32Backend backend, Float32Op op);

struct Symbols {
  void* context = nullptr;
  Float32Precision float32_precision = nullptr;
};

Symbols find_symbols() {
  Symbols symbols;
  void* library = dl_loaded("libtorch_cpu.so");
  if (library == nullptr) return symbols;
  auto global_context =
      reinterpret_cast<GlobalContext>(dl_symbol(library, "_ZN2at13globalContextEv"));
  symbols.float32_precision = reinterpret_cast<Float32Precision>(
      dl_symbol(library, "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE"));
  if (global_context != nullptr && symbols.float32_precision != nullptr) {
    symbols.context = global_context();
  }
  return symbols;
}

}  // namespace

bool tf32_allowed() {
  static const Symbols symbols = find_symbols();
  if (symbols.context == nullptr) return false;
  return symbols.float32_precision(symbols.context, Float32Backend::kCuda, Float32Op::kMatmul) ==
         kTf32;
}

}  // namespace torch_cubin
