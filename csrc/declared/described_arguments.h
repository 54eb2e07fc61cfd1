// DescribedArguments: the arguments of a call as JSON, for calls without CUDA tensors (fake tensors
// of torch.compile, CPU tensors). The counterpart of BoxedArguments.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "declared/expression.h"
#include "declared/schema.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {

class DescribedArguments {
 public:
  // `values`: the arguments by name; must outlive this object. A tensor is its metadata, with an
  // "address" if it has one; a list of tensors is a list; a float may be a string; a dtype is
  // torch's name.
  DescribedArguments(const Schema& schema, const nlohmann::json& values)
      : schema_(schema), values_(values) {}

  bool has_tensor(size_t i) const;
  TensorView view(size_t i);
  size_t length(size_t i) const;
  TensorView item(size_t i, size_t index);
  Value number(size_t i) const;
  std::string_view text(size_t i) const;

  // Whether every tensor has an address.
  bool have_addresses() const;

  // The address of the tensor viewed last; an address that satisfies every pattern if none is
  // given.
  const void* data(const TensorView& view) const;

 private:
  const nlohmann::json& value(size_t i) const;

  const Schema& schema_;
  const nlohmann::json& values_;
  DescribedTensors tensors_;
  const nlohmann::json* viewed_ = nullptr;
};

}  // namespace torch_cubin
