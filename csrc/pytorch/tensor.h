// TensorView: a tensor's metadata, read once through the C shims; and allocation of outputs.
//
// Every accessor of torch::stable::Tensor is a C call inside a try block: a hot path reads what it
// needs once, here, and works on plain integers from then on.
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

constexpr int64_t kMaxDims = 64;  // more than any model has; arrays of sizes live on the stack

// "(2, 3)", as Python prints a tuple.
std::string tuple_text(const int64_t* values, int64_t count);

// "cuda:0"
std::string device_text(int32_t type, int32_t index);

// Throws [input] for a tensor of more than kMaxDims dimensions.
struct TensorView {
  explicit TensorView(const Tensor& tensor) : TensorView(tensor.get()) {}
  explicit TensorView(AtenTensorHandle tensor);  // which stays the caller's
  // Of a tensor that is only described; `sizes` and `strides` stay the caller's.
  TensorView(const int64_t* sizes, const int64_t* strides, int64_t dim, ScalarType dtype,
             int32_t device_type, int32_t device_index);

  AtenTensorHandle handle = nullptr;  // null where it is only described
  int64_t dim = 0;
  const int64_t* sizes = nullptr;  // borrowed from the tensor
  const int64_t* strides = nullptr;
  ScalarType dtype;
  int32_t device_type = 0;
  int32_t device_index = 0;

  const void* data() const;       // throws [input] for elements without memory
  const void* find_data() const;  // null there, and where there are no elements
  bool on_cuda() const;
  std::string shape_text() const { return tuple_text(sizes, dim); }
  std::string device_text() const { return torch_cubin::device_text(device_type, device_index); }
};

inline std::optional<TensorView> view_of(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<TensorView>(*tensor) : std::nullopt;
}

// "bfloat16", as torch prints it without its "torch." prefix; "dtype 42" where unknown.
std::string dtype_name(ScalarType dtype);
const char* dtype_text(ScalarType dtype);  // the same; null where unknown
int64_t element_size(ScalarType dtype);    // bytes

// Whether `data`, which PyTorch gave for the tensor, is memory. Storages that were resized to nothing
// (FSDP does), and those of wrappers, begin at null, to which PyTorch adds the tensor's offset.
bool is_memory(const void* data, AtenTensorHandle tensor);

// The dtype of that name, as torch prints it; false where there is none whose elements are bytes.
bool find_dtype(const std::string& name, ScalarType* dtype);

// The device and memory of a contiguous tensor; false for every other one. Asks for as little as can
// be: the caller knows the kind of device, and that the tensor's values are those in its memory.
bool read_contiguous(AtenTensorHandle tensor, int32_t* device, uint64_t* address);

// A contiguous tensor on a CUDA device from PyTorch's caching allocator. A failure says
// "CUDA out of memory." first, as PyTorch's own does, so that retry helpers know it.
Tensor empty_cuda(const int64_t* sizes, int64_t dim, ScalarType dtype, int32_t device_index);

// The same with strides, which lay the elements out without gaps.
Tensor empty_cuda_strided(const int64_t* sizes, const int64_t* strides, int64_t dim,
                          ScalarType dtype, int32_t device_index);

// The same as a bare handle, which the caller deletes with aoti_torch_delete_tensor_object: a Tensor
// costs one more allocation.
AtenTensorHandle allocate_cuda(const int64_t* sizes, const int64_t* strides, int64_t dim,
                               ScalarType dtype, int32_t device_index);

// A fresh tensor on the device of `like`, contiguous where no strides are given.
Tensor empty_near(const TensorView& like, const int64_t* sizes, int64_t dim, ScalarType dtype,
                  const int64_t* strides = nullptr);

// Fills a tensor with zeros, on the current stream of its device.
void fill_with_zeros(AtenTensorHandle tensor);

}  // namespace torch_cubin
