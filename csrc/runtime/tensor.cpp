#include "runtime/tensor.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "cubin/error.h"
#include "driver/driver.h"
#include "runtime/torch_error.h"

namespace torch_cubin {
namespace {

// A shim that reads metadata fails only on an undefined tensor.
void check_read(AOTITorchError error) {
  if (error != 0) {
    fail({"input", "a tensor argument", "could not be read", "a defined tensor with storage", "",
          ""});
  }
}

}  // namespace

TensorView::TensorView(const Tensor& tensor) : handle(tensor.get()) {
  int64_t* sizes_ptr = nullptr;
  int64_t* strides_ptr = nullptr;
  int32_t code = 0;
  check_read(aoti_torch_get_dim(handle, &dim));
  if (dim > kMaxDims) {
    fail({"input", "a tensor argument", "has too many dimensions",
          "at most " + std::to_string(kMaxDims), std::to_string(dim), "Reshape it."});
  }
  check_read(aoti_torch_get_sizes(handle, &sizes_ptr));
  check_read(aoti_torch_get_strides(handle, &strides_ptr));
  check_read(aoti_torch_get_dtype(handle, &code));
  check_read(aoti_torch_get_device_type(handle, &device_type));
  check_read(aoti_torch_get_device_index(handle, &device_index));
  sizes = sizes_ptr;
  strides = strides_ptr;
  dtype = static_cast<ScalarType>(code);
}

const void* TensorView::data() const {
  void* pointer = nullptr;
  check_read(aoti_torch_get_data_ptr(handle, &pointer));
  return pointer;
}

bool TensorView::on_cuda() const {
  static const int32_t cuda = aoti_torch_device_type_cuda();
  return device_type == cuda;
}

std::string TensorView::shape_text() const {
  std::string text = "(";
  for (int64_t i = 0; i < dim; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  return text + (dim == 1 ? ",)" : ")");
}

std::string TensorView::device_text() const {
  if (on_cuda()) return "cuda:" + std::to_string(device_index);
  if (device_type == aoti_torch_device_type_cpu()) return "cpu";
  if (device_type == aoti_torch_device_type_meta()) return "meta";
  return "device type " + std::to_string(device_type);
}

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fnuz:
      return "float8_e4m3fnuz";
    case ScalarType::Float8_e5m2fnuz:
      return "float8_e5m2fnuz";
    case ScalarType::Float8_e8m0fnu:
      return "float8_e8m0fnu";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    default:
      return "dtype " + std::to_string(static_cast<int>(dtype));
  }
}

int64_t element_size(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Byte:
    case ScalarType::Bool:
      return 1;
    default:
      fail({"internal", "element_size", "does not know " + dtype_name(dtype), "", "", ""});
  }
}

Tensor empty_cuda(const int64_t* sizes, int64_t dim, ScalarType dtype, int32_t device_index) {
  int64_t strides[kMaxDims];
  int64_t step = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = step;
    // What overflows here is refused below.
    if (__builtin_mul_overflow(step, sizes[i] > 1 ? sizes[i] : 1, &step)) break;
  }
  return empty_cuda_strided(sizes, strides, dim, dtype, device_index);
}

Tensor empty_cuda_strided(const int64_t* sizes, const int64_t* strides, int64_t dim,
                          ScalarType dtype, int32_t device_index) {
  int64_t numel = 1;
  bool overflow = false;
  for (int64_t i = 0; i < dim; ++i) {
    overflow = __builtin_mul_overflow(numel, sizes[i] > 1 ? sizes[i] : 1, &numel) || overflow;
  }
  int64_t bytes = 0;
  overflow = __builtin_mul_overflow(numel, element_size(dtype), &bytes) || overflow;
  if (overflow) {
    fail({"input", "an output or workspace", "is too large", "at most 2^63 - 1 bytes", "more", ""});
  }
  AtenTensorHandle handle = nullptr;
  static const int32_t cuda = aoti_torch_device_type_cuda();
  if (aoti_torch_empty_strided(dim, sizes, strides, static_cast<int32_t>(dtype), cuda, device_index,
                               &handle) != 0) {
    if (driver_forked()) {
      fail({"fork", "an allocation on cuda:" + std::to_string(device_index),
            "was asked for in a forked process", "the process that initialised CUDA", "its child",
            "Start workers with the 'spawn' method."});
    }
    const std::string object = "an output or workspace of " + std::to_string(bytes) +
                               " bytes on cuda:" + std::to_string(device_index);
    // Torch 2.13 says why. Below, its text goes to stderr: then a lack of memory is what it must be.
    const std::string text = torch_error();
    if (!text.empty() && text.find("out of memory") == std::string::npos) {
      fail({"fault", object, "could not be allocated", "memory from PyTorch", text, ""});
    }
    fail_out_of_memory(object + " could not be allocated");
  }
  return Tensor(handle);
}

}  // namespace torch_cubin
