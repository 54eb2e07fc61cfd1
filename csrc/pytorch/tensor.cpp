#include "pytorch/tensor.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <new>

#include "cubin/error.h"
#include "cubin/stated_type.h"
#include "driver/driver.h"
#include "pytorch/contiguous.h"
#include "pytorch/tensor_type.h"
#include "pytorch/torch_error.h"

namespace torch_cubin {
namespace {

// A shim that reads metadata fails only on an undefined tensor.
void check_read(AOTITorchError error) {
  if (error != 0) {
    fail({"input", "a tensor argument", "could not be read", "a defined tensor with storage", "",
          ""});
  }
}

void check_dim(int64_t dim) {
  if (dim <= kMaxDims) return;
  fail({"input", "a tensor argument", "has too many dimensions",
        "at most " + std::to_string(kMaxDims), std::to_string(dim), "Reshape it."});
}

struct DtypeInfo {
  ScalarType dtype;
  const char* name;
  int64_t size;  // bytes; 0 for a dtype that appears in error messages only
};

constexpr DtypeInfo kDtypes[] = {
    {ScalarType::Half, "float16", 2},
    {ScalarType::BFloat16, "bfloat16", 2},
    {ScalarType::Float, "float32", 4},
    {ScalarType::Double, "float64", 8},
    {ScalarType::Byte, "uint8", 1},
    {ScalarType::Char, "int8", 1},
    {ScalarType::Short, "int16", 2},
    {ScalarType::Int, "int32", 4},
    {ScalarType::Long, "int64", 8},
    {ScalarType::Bool, "bool", 1},
    {ScalarType::ComplexHalf, "complex32", 4},
    {ScalarType::ComplexFloat, "complex64", 8},
    {ScalarType::ComplexDouble, "complex128", 16},
    {ScalarType::Float8_e4m3fn, "float8_e4m3fn", 1},
    {ScalarType::Float8_e5m2, "float8_e5m2", 1},
    {ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", 1},
    {ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", 1},
    {ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", 1},
    {ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2", 1},
    {ScalarType::UInt16, "uint16", 2},
    {ScalarType::UInt32, "uint32", 4},
    {ScalarType::UInt64, "uint64", 8},
    {ScalarType::QInt8, "qint8", 0},
    {ScalarType::QUInt8, "quint8", 0},
    {ScalarType::QInt32, "qint32", 0},
    {ScalarType::QUInt4x2, "quint4x2", 0},
    {ScalarType::QUInt2x4, "quint2x4", 0},
    {ScalarType::Bits1x8, "bits1x8", 0},
    {ScalarType::Bits2x4, "bits2x4", 0},
    {ScalarType::Bits4x2, "bits4x2", 0},
    {ScalarType::Bits8, "bits8", 0},
    {ScalarType::Bits16, "bits16", 0},
    {ScalarType::UInt1, "uint1", 0},
    {ScalarType::UInt2, "uint2", 0},
    {ScalarType::UInt3, "uint3", 0},
    {ScalarType::UInt4, "uint4", 0},
    {ScalarType::UInt5, "uint5", 0},
    {ScalarType::UInt6, "uint6", 0},
    {ScalarType::UInt7, "uint7", 0},
    {ScalarType::Int1, "int1", 0},
    {ScalarType::Int2, "int2", 0},
    {ScalarType::Int3, "int3", 0},
    {ScalarType::Int4, "int4", 0},
    {ScalarType::Int5, "int5", 0},
    {ScalarType::Int6, "int6", 0},
    {ScalarType::Int7, "int7", 0},
    // Newer than the PyTorch headers of this build (BComplex32 of torch 2.15).
    {static_cast<ScalarType>(46), "bcomplex32", 0},
};

const DtypeInfo* find(ScalarType dtype) {
  for (const DtypeInfo& info : kDtypes) {
    if (info.dtype == dtype) return &info;
  }
  return nullptr;
}

}  // namespace

TensorView::TensorView(AtenTensorHandle tensor) : handle(tensor) {
  int64_t* sizes_ptr = nullptr;
  int64_t* strides_ptr = nullptr;
  int32_t code = 0;
  check_read(aoti_torch_get_dim(handle, &dim));
  check_dim(dim);
  check_read(aoti_torch_get_sizes(handle, &sizes_ptr));
  check_read(aoti_torch_get_strides(handle, &strides_ptr));
  check_read(aoti_torch_get_dtype(handle, &code));
  check_read(aoti_torch_get_device_type(handle, &device_type));
  check_read(aoti_torch_get_device_index(handle, &device_index));
  sizes = sizes_ptr;
  strides = strides_ptr;
  dtype = static_cast<ScalarType>(code);
}

TensorView::TensorView(const int64_t* sizes, const int64_t* strides, int64_t dim, ScalarType dtype,
                       int32_t device_type, int32_t device_index)
    : dim(dim),
      sizes(sizes),
      strides(strides),
      dtype(dtype),
      device_type(device_type),
      device_index(device_index) {
  check_dim(dim);
}

const void* TensorView::find_data() const {
  void* pointer = nullptr;
  check_read(aoti_torch_get_data_ptr(handle, &pointer));
  return is_memory(pointer, handle) ? pointer : nullptr;
}

const void* TensorView::data() const {
  const void* pointer = find_data();
  if (pointer == nullptr && has_elements(sizes, dim)) {
    fail({"input", "a tensor argument", "has elements but no memory",
          "a tensor whose storage is allocated",
          tensor_type_text(handle) + " with a null address, shape " + shape_text(),
          "Pass what a wrapper wraps."});
  }
  return pointer;
}

bool is_defined(const Tensor& tensor) {
  bool yes = false;
  aoti_torch_is_defined(tensor.get(), &yes);
  return yes;
}

Tensor undefined_tensor() {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_new_uninitialized_tensor(&handle) != 0) throw std::bad_alloc();
  return Tensor(handle);
}

[[gnu::hot]] bool is_memory(const void* data, AtenTensorHandle tensor) {
  // No storage offset reaches this value, so a pointer at or above it is memory. This covers most
  // tensors.
  constexpr uint64_t kMostMemory = uint64_t{1} << 40;
  const uint64_t address = reinterpret_cast<uintptr_t>(data);
  if (address >= kMostMemory) return true;
  int64_t offset = 0;
  int32_t dtype = 0;
  check_read(aoti_torch_get_storage_offset(tensor, &offset));
  check_read(aoti_torch_get_dtype(tensor, &dtype));
  const auto itemsize = static_cast<uint64_t>(element_size(static_cast<ScalarType>(dtype)));
  return address != static_cast<uint64_t>(offset) * itemsize;
}

[[gnu::hot]] bool has_dtype(AtenTensorHandle tensor, uint64_t set) {
  static_assert(
      static_cast<int>(ScalarType::Float) == static_cast<int>(Element::kFloat32) &&
          static_cast<int>(ScalarType::BFloat16) == static_cast<int>(Element::kBFloat16) &&
          static_cast<int>(ScalarType::UInt64) == static_cast<int>(Element::kUInt64) &&
          static_cast<int>(ScalarType::Float4_e2m1fn_x2) == static_cast<int>(Element::kFloat4),
      "one set of numbers");
  int32_t dtype = -1;
  return aoti_torch_get_dtype(tensor, &dtype) == 0 && has_element(set, dtype);
}

[[gnu::hot]] bool read_contiguous(AtenTensorHandle tensor, int32_t* device, uint64_t* address) {
  bool contiguous = false;
  void* data = nullptr;
  if (aoti_torch_is_contiguous(tensor, &contiguous) != 0 || !contiguous) return false;
  if (aoti_torch_get_device_index(tensor, device) != 0) return false;
  if (*device < 0) *device = 0;  // the CPU has none
  if (aoti_torch_get_data_ptr(tensor, &data) != 0) return false;
  *address = reinterpret_cast<uintptr_t>(data);
  return is_memory(data, tensor);
}

bool TensorView::on_cuda() const {
  static const int32_t cuda = aoti_torch_device_type_cuda();
  return device_type == cuda;
}

std::string tuple_text(const int64_t* values, int64_t count) {
  std::string text = "(";
  for (int64_t i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + (count == 1 ? ",)" : ")");
}

std::string device_text(int32_t type, int32_t index) {
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(index);
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_meta()) return "meta";
  return "device type " + std::to_string(type);
}

std::string dtype_name(ScalarType dtype) {
  const char* name = dtype_text(dtype);
  return name != nullptr ? name : "dtype " + std::to_string(static_cast<int>(dtype));
}

const char* dtype_text(ScalarType dtype) {
  const DtypeInfo* info = find(dtype);
  return info != nullptr ? info->name : nullptr;
}

int64_t element_size(ScalarType dtype) {
  const DtypeInfo* info = find(dtype);
  if (info == nullptr || info->size == 0) {
    fail({"internal", "element_size", "does not know " + dtype_name(dtype), "", "", ""});
  }
  return info->size;
}

bool find_dtype(const std::string& name, ScalarType* dtype) {
  for (const DtypeInfo& info : kDtypes) {
    if (name != info.name) continue;
    *dtype = info.dtype;
    return info.size > 0;
  }
  return false;
}

Tensor empty_cuda(const int64_t* sizes, int64_t dim, ScalarType dtype, int32_t device_index) {
  int64_t strides[kMaxDims];
  contiguous_strides(sizes, dim, strides);
  return empty_cuda_strided(sizes, strides, dim, dtype, device_index);
}

Tensor empty_cuda_strided(const int64_t* sizes, const int64_t* strides, int64_t dim,
                          ScalarType dtype, int32_t device_index) {
  return Tensor(allocate_cuda(sizes, strides, dim, dtype, device_index));
}

AtenTensorHandle allocate_cuda(const int64_t* sizes, const int64_t* strides, int64_t dim,
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
    // torch 2.13 reports the reason. Older versions print it to stderr; out of memory is assumed.
    const std::string text = torch_error();
    if (!text.empty() && text.find("out of memory") == std::string::npos) {
      fail({"fault", object, "could not be allocated", "memory from PyTorch", text, ""});
    }
    fail_out_of_memory(object + " could not be allocated");
  }
  return handle;
}

Tensor empty_near(const TensorView& like, const int64_t* sizes, int64_t dim, ScalarType dtype,
                  const int64_t* strides) {
  int64_t contiguous[kMaxDims];
  if (strides == nullptr) {
    contiguous_strides(sizes, dim, contiguous);
    strides = contiguous;
  }
  if (like.on_cuda()) return empty_cuda_strided(sizes, strides, dim, dtype, like.device_index);
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dim, sizes, strides, static_cast<int32_t>(dtype), like.device_type,
                               like.device_index, &handle) != 0) {
    fail({"oom", "the CPU reference's output", "could not be allocated",
          tuple_text(sizes, dim) + " elements of " + dtype_name(dtype), "an error",
          "Free memory."});
  }
  return Tensor(handle);
}

void fill_with_zeros(AtenTensorHandle tensor) {
  if (aoti_torch_zero_(tensor) == 0) return;
  fail({"fault", "a workspace", "could not be filled with zeros", "", torch_error(), ""});
}

}  // namespace torch_cubin
