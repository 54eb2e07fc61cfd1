#include "pytorch/described_tensor.h"

#include <cstdlib>
#include <nlohmann/json.hpp>

namespace torch_cubin {

namespace {

int32_t device_type_of(const std::string& name) {
  if (name == "cuda") return aoti_torch_device_type_cuda();
  if (name == "cpu") return aoti_torch_device_type_cpu();
  return name == "meta" ? aoti_torch_device_type_meta() : -1;
}

}  // namespace

std::optional<TensorView> DescribedTensors::find(const char* name) {
  const auto found = tensors_.find(name);
  if (found == tensors_.end() || found->is_null()) return std::nullopt;
  const auto device = found->at("device").get<std::string>();
  const size_t colon = device.find(':');
  const int index = colon == std::string::npos ? -1 : std::atoi(device.c_str() + colon + 1);
  ScalarType dtype = ScalarType::Undefined;
  find_dtype(found->at("dtype").get<std::string>(), &dtype);
  const auto& sizes = numbers_.emplace_back(found->at("sizes").get<std::vector<int64_t>>());
  const auto& strides = numbers_.emplace_back(found->at("strides").get<std::vector<int64_t>>());
  return TensorView(sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()), dtype,
                    device_type_of(device.substr(0, colon)), index);
}

double described_float(const nlohmann::json& text) {
  return std::strtod(text.get<std::string>().c_str(), nullptr);
}

}  // namespace torch_cubin
