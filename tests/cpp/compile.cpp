// torch_cubin/compile.h, run by tests/unit/test_cpp_compile.py, and with "gpu" by tests/gpu.
#include <torch_cubin/compile.h>

#include <cstdio>
#include <cstring>

using namespace torch_cubin;

namespace {

const char kSource[] = R"(
template <class T>
__global__ void scale(T* x, T by, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= by;
}
extern "C" __global__ void plain(int* out) { *out = __CUDA_ARCH__; }
)";

}  // namespace

int main(int count, char** arguments) {
  const bool gpu = count > 1 && std::strcmp(arguments[1], "gpu") == 0;
  try {
    const char* arch = gpu ? "" : "sm_90a";
    const Compiled compiled = compile(kSource, {arch, {"scale<float>", "&scale<double>"}});
    for (const auto& [name, symbol] : compiled.symbols()) {
      std::printf("%s: %s\n", name.c_str(), symbol.c_str());
    }
    compiled["scale<float>"].check<float*, float, int>();
    compiled["&scale<double>"].check<double*, double, int>();
    compiled["plain"].check<int*>();
    try {
      compile("__global__ void f() { nonsense; }", {"sm_90a", {}, {}, "mine.cu"});
    } catch (const Error& error) {
      std::printf("%s\n", error.what());
    }
    if (gpu) {
      Buffer<float> x(std::vector<float>{1, 2, 3});
      compiled["scale<float>"](grid(1), block(32), nullptr, x, 2.0f, 3);
      Buffer<int> arch_of(1);
      compiled["plain"](grid(1), block(1), nullptr, arch_of);
      if (x.to_vector()[2] != 6) return 1;
      if (arch_of.to_vector()[0] != 10 * device_info().capability) return 1;
    }
    std::puts("right");
    return 0;
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
