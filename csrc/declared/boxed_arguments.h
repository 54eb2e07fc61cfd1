// BoxedArguments: the arguments of one call as PyTorch passes them to a kernel of the stable ABI,
// read by the schema's types.
//
// The kernel owns its arguments (tensors, lists, strings, the cells of optionals) and must release
// them exactly once, whatever throws. Reading here borrows; the destructor releases all.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string_view>

#include "declared/expression.h"
#include "declared/schema.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

class BoxedArguments {
 public:
  BoxedArguments(const Schema& schema, const StableIValue* stack)
      : schema_(schema), stack_(stack) {}
  ~BoxedArguments();
  BoxedArguments(const BoxedArguments&) = delete;
  BoxedArguments& operator=(const BoxedArguments&) = delete;

  // For Tensor or Tensor?; null if it is absent.
  AtenTensorHandle tensor(size_t i) const;
  bool has_tensor(size_t i) const { return tensor(i) != nullptr; }
  TensorView view(size_t i) const { return TensorView(tensor(i)); }

  // For Tensor[].
  size_t length(size_t i) const;
  TensorView item(size_t i, size_t index) const;

  // The address of a tensor's elements; null if they have no memory.
  const void* data(const TensorView& view) const { return view.find_data(); }

  // A number or bool; of type kNone if an optional one is absent.
  Value number(size_t i) const;

  // A str, valid as long as this object; for a ScalarType, torch's name.
  std::string_view text(size_t i) const;

 private:
  const Schema& schema_;
  const StableIValue* stack_;
};

}  // namespace torch_cubin
