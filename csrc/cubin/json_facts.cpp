// Image and PTX facts as JSON.
#include "cubin/json_facts.h"

#include <utility>

#include "cubin/sniff.h"

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

json to_json(const PtxKernel& kernel) {
  json params = json::array();
  for (const PtxParam& param : kernel.params) {
    params.push_back({{"index", param.index},
                      {"name", param.name},
                      {"type", param.type},
                      {"size", param.size},
                      {"alignment", param.alignment},
                      {"kind", kind_name(param.kind)}});
  }
  return {{"name", kernel.name},
          {"params", std::move(params)},
          {"max_registers", kernel.max_registers != 0 ? json(kernel.max_registers) : json(nullptr)},
          {"required_block", triple(kernel.required_block)},
          {"max_block", triple(kernel.max_block)},
          {"cluster", triple(kernel.cluster)},
          {"uses_dynamic_shared", kernel.uses_dynamic_shared}};
}

}  // namespace

json to_json(const Image& image) {
  json kernels = json::array();
  for (const KernelInfo& kernel : image.kernels) kernels.push_back(to_json(kernel));
  return {{"kind", format_name(image.relocatable ? Format::kRelocatableCubin : Format::kCubin)},
          {"arch", image.arch.name()},
          {"sm", image.arch.sm},
          {"abi_version", image.abi_version},
          {"toolkit", image.toolkit},
          {"size", image.size},
          {"kernels", std::move(kernels)}};
}

json to_json(const Ptx& ptx) {
  json kernels = json::array();
  for (const PtxKernel& kernel : ptx.kernels) kernels.push_back(to_json(kernel));
  return {{"kind", format_name(Format::kPtx)},
          {"version", ptx.version},
          {"arch", ptx.arch.name()},
          {"sm", ptx.arch.sm},
          {"address_size", ptx.address_size},
          {"size", ptx.size},
          {"uses_dynamic_shared", ptx.uses_dynamic_shared},
          {"kernels", std::move(kernels)}};
}

std::string dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string image_to_json(const Image& image) { return dump(to_json(image)); }

}  // namespace torch_cubin
