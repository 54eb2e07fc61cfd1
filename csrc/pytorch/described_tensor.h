// DescribedTensors: metadata of an op's arguments as JSON, for the checks of tensors that C++
// cannot read: fake tensors of torch.compile, and the elements of a batch under vmap.
#pragma once

#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "pytorch/tensor.h"

namespace torch_cubin {

class DescribedTensors {
 public:
  // The view of {"dtype": "float16", "device": "cuda:0", "sizes": [...], "strides": [...]}. Valid
  // as long as this object. Throws [input] for more than kMaxDims dims.
  TensorView view(const nlohmann::json& tensor);

  // The view of the object's member `name`; nullopt if it is null or missing.
  std::optional<TensorView> find(const nlohmann::json& tensors, const char* name);

 private:
  std::deque<std::vector<int64_t>> numbers_;
};

// Parses a number, or a string such as "inf": JSON has neither infinities nor NaN.
double described_float(const nlohmann::json& number);

}  // namespace torch_cubin
