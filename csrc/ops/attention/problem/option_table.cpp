#include "ops/attention/problem/option_table.h"

namespace torch_cubin {

std::string option_schema(const std::string& name, const OptionalTensor&) {
  return "Tensor? " + name + "=None";
}

std::string option_schema(const std::string& name, const std::optional<double>&) {
  return "float? " + name + "=None";
}

std::string option_schema(const std::string& name, bool value) {
  return "bool " + name + (value ? "=True" : "=False");
}

std::string option_schema(const std::string& name, int64_t value) {
  return "int " + name + "=" + std::to_string(value);
}

std::string option_schema(const std::string& name, double value) {
  return "float " + name + "=" + std::to_string(value);
}

}  // namespace torch_cubin
