// image_to_json: the facts of an Image as JSON, for torch_cubin.inspect.
#include <nlohmann/json.hpp>

#include "cubin/image.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

const char* kind_name(ParamKind kind) {
  switch (kind) {
    case ParamKind::kPointer:
      return "pointer";
    case ParamKind::kValue:
      return "value";
    case ParamKind::kUnknown:
      break;
  }
  return "unknown";
}

// Null where the file records nothing.
json triple(const std::array<uint32_t, 3>& value) {
  if (value == std::array<uint32_t, 3>{}) return nullptr;
  return value;
}

json to_json(const KernelInfo& kernel) {
  json params = json::array();
  for (const ParamInfo& param : kernel.params) {
    params.push_back({{"index", param.index},
                      {"offset", param.offset},
                      {"size", param.size},
                      {"kind", kind_name(param.kind)}});
  }
  return {{"name", kernel.name},
          {"params", std::move(params)},
          {"param_bytes", kernel.param_bytes},
          {"registers", kernel.registers},
          {"static_shared", kernel.static_shared},
          {"stack", kernel.stack},
          {"barriers", kernel.barriers},
          {"required_block", triple(kernel.required_block)},
          {"max_block", triple(kernel.max_block)},
          {"cluster", triple(kernel.cluster)},
          {"uses_dynamic_shared", kernel.uses_dynamic_shared}};
}

}  // namespace

std::string image_to_json(const Image& image) {
  json kernels = json::array();
  for (const KernelInfo& kernel : image.kernels) kernels.push_back(to_json(kernel));
  const json all = {
      {"arch", image.arch.name()}, {"sm", image.arch.sm}, {"abi_version", image.abi_version},
      {"toolkit", image.toolkit},  {"size", image.size},  {"kernels", std::move(kernels)}};
  // A name may hold any byte but NUL: what is not UTF-8 becomes U+FFFD rather than an exception.
  return all.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace torch_cubin
