// A kernel of a folder of Triton's cache, launched from C++ with the user's arguments alone.
//
//   triton_folder FOLDER        (a kernel `add` of x, y, out, n, in blocks of 256)
//
// Run by tests/gpu/test_cuda_triton_folder.py.
#include <torch_cubin/cubin.h>

#include <cstdio>
#include <vector>

using namespace torch_cubin;

int main(int, char** arguments) {
  constexpr int n = 1008;  // the kernel was compiled for multiples of 16
  std::vector<float> first(n), second(n);
  for (int i = 0; i < n; ++i) {
    first[static_cast<size_t>(i)] = static_cast<float>(i);
    second[static_cast<size_t>(i)] = static_cast<float>(3 * i);
  }
  try {
    const Module module = Module::from_file(arguments[1]);
    Buffer<float> x(first), y(second), out(n);
    module["add"](launch(grid((n + 255) / 256)), x, y, out, n);
    const std::vector<float> sums = out.to_vector();
    for (int i = 0; i < n; ++i) {
      if (sums[static_cast<size_t>(i)] != static_cast<float>(4 * i)) {
        std::printf("element %d is %g\n", i, static_cast<double>(sums[static_cast<size_t>(i)]));
        return 1;
      }
    }
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  std::printf("right\n");
  return 0;
}
