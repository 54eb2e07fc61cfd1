// A PyTorch op around a kernel that is embedded in this library: CMakeLists.txt and setup.py build
// it, use.py uses it. It uses PyTorch's stable ABI: one file for every torch from 2.11 on.
#include <torch_cubin/torch.h>

namespace {

using namespace torch_cubin;

TORCH_CUBIN_EMBED(scale_add_cubin);

Tensor scale_add(const Tensor& x, const Tensor& y, double scale) {
  static const Kernel kernel = embedded(scale_add_cubin)["scale_add"];
  if (x.numel() != y.numel() || x.scalar_type() != ScalarType::Float ||
      y.scalar_type() != ScalarType::Float) {
    throw make_error("input", "scale_add", "takes two float32 tensors of one shape");
  }
  Tensor out = torch_cubin::empty_like(x);
  const int64_t n = x.numel();
  if (n == 0) return out;
  // The tensors' device and PyTorch's current stream there.
  kernel(grid(cdiv(n, 256)), block(256), x, y, out, static_cast<float>(scale), static_cast<int>(n));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(cpp_example, m) {
  m.def("scale_add(Tensor x, Tensor y, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cpp_example, CUDA, m) { m.impl("scale_add", TORCH_BOX(&scale_add)); }
