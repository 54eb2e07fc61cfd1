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

TensorView DescribedTensors::view(const nlohmann::json& tensor) {
  const auto device = tensor.at("device").get<std::string>();
  const size_t colon = device.find(':');
  const int index = colon == std::string::npos ? -1 : std::stoi(device.substr(colon + 1));
  ScalarType dtype = ScalarType::Undefined;
  find_dtype(tensor.at("dtype").get<std::string>(), &dtype);
  const auto& sizes = numbers_.emplace_back(tensor.at("sizes").get<std::vector<int64_t>>());
  const auto& strides = numbers_.emplace_back(tensor.at("strides").get<std::vector<int64_t>>());
  return TensorView(sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()), dtype,
                    device_type_of(device.substr(0, colon)), index);
}

std::optional<TensorView> DescribedTensors::find(const nlohmann::json& tensors, const char* name) {
  const auto found = tensors.find(name);
  if (found == tensors.end() || found->is_null()) return std::nullopt;
  return view(*found);
}

double described_float(const nlohmann::json& number) {
  return number.is_string() ? std::strtod(number.get<std::string>().c_str(), nullptr)
                            : number.get<double>();
}

}  // namespace torch_cubin
