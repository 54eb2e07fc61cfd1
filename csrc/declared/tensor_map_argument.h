// TensorMapArgument: a TMA descriptor that a contract makes for each call, or
// torch_cubin.TensorMap, which says what the fields mean. The one place that knows which tensors
// the hardware takes.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "declared/call_state.h"

namespace torch_cubin {

class TensorMapArgument {
 public:
  // `label` names it in errors. Throws [input].
  TensorMapArgument(const nlohmann::json& fields, const Scope& scope, const std::string& label);

  // What errors of calls name it by.
  void rename(const std::string& label) { label_ = label; }

  // The place of the tensor that it describes.
  size_t tensor() const { return tensor_; }

  // Writes 128 bytes; `out` may be null, which only checks. Throws [input] for a tensor that the
  // hardware cannot copy in such boxes.
  void encode(const TensorFacts& tensor, void* address, int32_t device, const Arguments& arguments,
              uint8_t* out) const;
  void encode(const CallState& state, uint8_t* out) const {
    encode(state.facts[tensor_], state.addresses[tensor_], state.device, state.arguments(), out);
  }

 private:
  [[noreturn]] void refuse(const std::string& problem, const std::string& expected,
                           const std::string& got) const;

  std::string label_;
  size_t tensor_ = 0;  // its place
  std::vector<Expression> box_;
  std::vector<uint32_t> element_strides_;  // empty: all 1
  uint32_t swizzle_ = 0;                   // the driver's numbers
  uint32_t interleave_ = 0;
  uint32_t l2_promotion_ = 0;
  uint32_t oob_fill_ = 0;
};

}  // namespace torch_cubin
