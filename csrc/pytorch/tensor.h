// TensorView: a tensor's metadata, read once through the C shims; and allocation of outputs.
//
// Every accessor of torch::stable::Tensor is a C call inside a try block. The hot path reads the
// metadata once, here, and uses plain integers afterwards.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

namespace torch_cubin {

using torch::stable::Tensor;
using ScalarType = torch::headeronly::ScalarType;

constexpr int64_t kMaxDims = 64;  // bounds the arrays of sizes on the stack

// "(2, 3)", as Python prints a tuple.
std::string tuple_text(const int64_t* values, int64_t count);

// "cuda:0"
std::string device_text(int32_t type, int32_t index);

// Throws [input] for a tensor of more than kMaxDims dimensions.
struct TensorView {
  explicit TensorView(const Tensor& tensor) : TensorView(tensor.get()) {}
  explicit TensorView(AtenTensorHandle tensor);  // borrows the tensor
  // A tensor without data, given by its metadata. Borrows `sizes` and `strides`.
  TensorView(const int64_t* sizes, const int64_t* strides, int64_t dim, ScalarType dtype,
             int32_t device_type, int32_t device_index);

  AtenTensorHandle handle = nullptr;  // null for a tensor given by its metadata
  int64_t dim = 0;
  const int64_t* sizes = nullptr;  // borrowed from the tensor
  const int64_t* strides = nullptr;
  ScalarType dtype;
  int32_t device_type = 0;
  int32_t device_index = 0;

  const void* data() const;       // throws [input] if the elements have no memory
  const void* find_data() const;  // null if the elements have no memory, or there are none
  bool on_cuda() const;
  std::string shape_text() const { return tuple_text(sizes, dim); }
  std::string device_text() const { return torch_cubin::device_text(device_type, device_index); }
};

inline std::optional<TensorView> view_of(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<TensorView>(*tensor) : std::nullopt;
}

bool is_defined(const Tensor& tensor);
Tensor undefined_tensor();

// "bfloat16": the name that torch prints, without "torch."; "dtype 42" for an unknown dtype.
std::string dtype_name(ScalarType dtype);
const char* dtype_text(ScalarType dtype);  // the same; null for an unknown dtype
int64_t element_size(ScalarType dtype);    // bytes

// Whether the data pointer that PyTorch returned for the tensor points to memory. A storage resized
// to zero bytes (as by FSDP) or of a wrapper subclass starts at null; PyTorch adds the storage
// offset.
bool is_memory(const void* data, AtenTensorHandle tensor);

// The dtype with the name that torch prints. False if there is none, or its elements are not bytes.
bool find_dtype(const std::string& name, ScalarType* dtype);

// Device index and address of a contiguous tensor; false for any other layout. The caller has
// already checked the device type, and that the tensor is plain memory (no conjugate, negative or
// wrapper).
bool read_contiguous(AtenTensorHandle tensor, int32_t* device, uint64_t* address);

// Whether the tensor's dtype is in that set (cubin/stated_type.h).
bool has_dtype(AtenTensorHandle tensor, uint64_t set);

// Allocates a contiguous tensor on a CUDA device from PyTorch's caching allocator. The error text
// of a failed allocation starts with "CUDA out of memory.", so that retry helpers recognise it.
Tensor empty_cuda(const int64_t* sizes, int64_t dim, ScalarType dtype, int32_t device_index);

// The same with the given strides, which must leave no gaps.
Tensor empty_cuda_strided(const int64_t* sizes, const int64_t* strides, int64_t dim,
                          ScalarType dtype, int32_t device_index);

// The same as a raw handle, which the caller deletes with aoti_torch_delete_tensor_object. Saves
// the heap allocation of a Tensor.
AtenTensorHandle allocate_cuda(const int64_t* sizes, const int64_t* strides, int64_t dim,
                               ScalarType dtype, int32_t device_index);

// A fresh tensor on the device of `like`, contiguous if no strides are given.
Tensor empty_near(const TensorView& like, const int64_t* sizes, int64_t dim, ScalarType dtype,
                  const int64_t* strides = nullptr);

// Fills a tensor with zeros, on the current stream of its device.
void fill_with_zeros(AtenTensorHandle tensor);

}  // namespace torch_cubin
