// Vector addition from a PTX file, whose kernel has a C++ name: no PyTorch, no CUDA headers.
//
//   vec_add_ptx kernels/vec_add.ptx
#include <torch_cubin/cubin.h>

#include "support.h"

using namespace torch_cubin;

int main(int count, char** arguments) {
  if (count != 2) return example::usage("vec_add_ptx kernels/vec_add.ptx");
  try {
    Module module = Module::from_file(arguments[1]);
    Kernel add = module["vecAdd"];  // _Z6vecAddPKfS0_Pfi in the file

    constexpr int n = 100003;
    std::vector<float> x(n), y(n);
    std::vector<double> expected(n);
    for (int i = 0; i < n; ++i) {
      x[i] = static_cast<float>(i);
      y[i] = 0.5f * static_cast<float>(i % 100);
      expected[i] = static_cast<double>(x[i]) + y[i];
    }
    Buffer<float> a(x), b(y), c(n);
    Stream stream = nullptr;  // a cudaStream_t or CUstream would do
    add(grid(cdiv(n, 256)), block(256), stream, a, b, c, n);
    return example::compare("vecAdd", c.to_vector(stream), expected, 0);
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
