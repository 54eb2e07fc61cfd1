// A 512 x 512 x 512 product in fp16 from a cubin file that nvcc wrote.
//
//   matmul_cubin kernels/matmul.sm_90a.cubin
#include <torch_cubin/cubin.h>

#include "support.h"

using namespace torch_cubin;

int main(int count, char** arguments) {
  if (count != 2) return example::usage("matmul_cubin kernels/matmul.sm_90a.cubin");
  try {
    // For several architectures: Module::from_files({"matmul.sm_80.cubin", "matmul.sm_90a.cubin"}).
    Module module = Module::from_file(arguments[1]);
    // The types are compared with the file's parameters here, and converted to at each call.
    auto matmul =
        module.kernel<void(const void*, const void*, float*, int, int, int)>("matmul_fp16");
    module.preload();  // now rather than at the first launch

    constexpr int m = 512, n = 512, k = 512;
    std::vector<uint16_t> left(m * k), right(k * n);
    for (size_t i = 0; i < left.size(); ++i) {
      left[i] = example::to_half(static_cast<float>(example::small_number(i)));
      right[i] = example::to_half(static_cast<float>(example::small_number(7 * i + 3)));
    }
    Buffer<uint16_t> a(left), b(right);
    Buffer<float> c(static_cast<size_t>(m * n));
    matmul(grid(n / 64, m / 64), block(512), nullptr, a.data(), b.data(), c.data(), m, n, k);
    const auto expected = example::product(left, right, m, n, k);
    return example::compare("matmul_fp16", c.to_vector(), expected, 0);
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
