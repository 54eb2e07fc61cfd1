// BoxedArguments: the arguments of one call as PyTorch hands them to a kernel of the stable ABI, read
// by the schema's types.
//
// The kernel owns what it is given (tensors, lists, strings, the cells of optionals) and must give
// it back exactly once, whatever throws half way: reading here takes nothing, the destructor gives
// all back.
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

  // Of a Tensor or Tensor?; null where it is absent.
  AtenTensorHandle tensor(size_t i) const;
  bool has_tensor(size_t i) const { return tensor(i) != nullptr; }
  TensorView view(size_t i) const { return TensorView(tensor(i)); }

  // Of a Tensor[].
  size_t length(size_t i) const;
  TensorView item(size_t i, size_t index) const;

  // Where a tensor's elements lie; null where they have no memory.
  const void* data(const TensorView& view) const { return view.find_data(); }

  // Of a number or bool; of type kNone where an optional one is absent.
  Value number(size_t i) const;

  // Of a str, valid as long as this; of a ScalarType, torch's name.
  std::string_view text(size_t i) const;

 private:
  const Schema& schema_;
  const StableIValue* stack_;
};

}  // namespace torch_cubin
