// DescribedTensors: the arguments of an op by their metadata alone, as JSON, for checks of tensors that
// C++ cannot read: those that torch.compile traces with, and the elements of a batch under vmap.
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
  // Of {"dtype": "float16", "device": "cuda:0", "sizes": [...], "strides": [...]}. What the view points
  // to lives as long as this. Throws [input] for too many dims.
  TensorView view(const nlohmann::json& tensor);

  // Of the member `name` of an object; none where it is null or not there.
  std::optional<TensorView> find(const nlohmann::json& tensors, const char* name);

 private:
  std::deque<std::vector<int64_t>> numbers_;
};

// A number, which may be a text: JSON has neither infinities nor NaN.
double described_float(const nlohmann::json& number);

}  // namespace torch_cubin
