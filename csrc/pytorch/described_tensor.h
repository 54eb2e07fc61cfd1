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
  // {"query": {"dtype": "float16", "device": "cuda:0", "sizes": [...], "strides": [...]}, ...}, which
  // must stay as long as this. A tensor that a call leaves out is null, or not there.
  explicit DescribedTensors(const nlohmann::json& tensors) : tensors_(tensors) {}

  // Throws [input] for too many dims. What the view points to lives as long as this.
  std::optional<TensorView> find(const char* name);
  TensorView get(const char* name) { return find(name).value(); }

 private:
  const nlohmann::json& tensors_;
  std::deque<std::vector<int64_t>> numbers_;
};

// A number of a JSON object whose floats are texts, since JSON has neither infinities nor NaN.
double described_float(const nlohmann::json& text);

}  // namespace torch_cubin
