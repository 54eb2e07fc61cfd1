// Tensors that PyTorch takes for CUDA's, in a CPU build of PyTorch: their memory is the host's.
//
// Supported are torch.ops.fake_cuda.make, empty_strided on a "cuda" device (how the library
// allocates), zero_, and fill_ of float32; no other op: no arithmetic, no copies, no printing.
#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace {

// An offset of -1: there is no memory.
at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                int64_t device, int64_t offset) {
  int64_t elements = 1 + offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    elements += sizes[i] > 0 ? (sizes[i] - 1) * strides[i] : 0;
  }
  const bool none = offset < 0;
  const size_t bytes = none ? 0 : (elements * c10::elementSize(dtype) + 511) / 512 * 512;
  void* memory = none ? nullptr : std::aligned_alloc(512, bytes);
  c10::Device where(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(memory, memory, &std::free, where), nullptr, false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, none ? 0 : offset);
  return tensor;
}

// A tensor in another's memory. as_strided itself is missing, as every op of CUDA's.
at::Tensor part(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides,
                int64_t offset) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(base.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), base.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  return make(sizes, strides, dtype.value_or(at::kFloat), device ? device->index() : 0, 0);
}

// Scratch that is zeroed; it is contiguous.
at::Tensor& zero_(at::Tensor& tensor) {
  if (tensor.nbytes() > 0) std::memset(tensor.data_ptr(), 0, tensor.nbytes());
  return tensor;
}

at::Tensor& fill_(at::Tensor& tensor, const at::Scalar& value) {
  if (tensor.numel() > 0) {
    std::fill_n(tensor.data_ptr<float>(), tensor.nbytes() / sizeof(float), value.to<float>());
  }
  return tensor;
}

}  // namespace

// Autograd asks for one where such a tensor requires grad.
using NoOpGuard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, NoOpGuard)

TORCH_LIBRARY(fake_cuda, m) {
  m.def("make(int[] size, int[] stride, ScalarType dtype, int device, int offset) -> Tensor",
        &make);
  m.def("part(Tensor base, int[] size, int[] stride, int offset) -> Tensor", &part);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty_strided", &empty_strided);
  m.impl("zero_", &zero_);
  m.impl("fill_.Scalar", &fill_);
}
