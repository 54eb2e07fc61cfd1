// Image and PTX facts as JSON.
#include "cubin/json_facts.h"

#include <utility>

#include "cubin/demangle.h"
#include "cubin/sniff.h"

namespace torch_cubin {

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

namespace {

using nlohmann::json;

// Null if not recorded.
json triple(const std::array<uint32_t, 3>& value) {
  if (value == std::array<uint32_t, 3>{}) return nullptr;
  return value;
}

// A kernel with its C++ name and the parameter types from it.
struct NamedKernel {
  explicit NamedKernel(KernelInfo info)
      : kernel(std::move(info)),
        cpp_name(demangled_if_short(kernel.name)),
        has_types(state_types(kernel, cpp_name)) {}
  json cpp_type(size_t i) const { return has_types ? kernel.params[i].stated.text : ""; }
  KernelInfo kernel;
  std::string cpp_name;
  bool has_types;
};

json to_json(const std::vector<VariableInfo>& variables) {
  json out = json::array();
  for (const VariableInfo& variable : variables) {
    out.push_back({{"name", variable.name},
                   {"cpp_name", demangled_if_short(variable.name)},
                   {"size", variable.size},
                   {"space", variable.is_constant ? "constant" : "global"}});
  }
  return out;
}

json to_json(const KernelInfo& info) {
  const NamedKernel named(info);
  const KernelInfo& kernel = named.kernel;
  json params = json::array();
  for (const ParamInfo& param : kernel.params) {
    params.push_back({{"index", param.index},
                      {"offset", param.offset},
                      {"size", param.size},
                      {"kind", kind_name(param.kind)},
                      {"cpp_type", named.cpp_type(params.size())}});
  }
  return {{"name", kernel.name},
          {"cpp_name", named.cpp_name},
          {"params", std::move(params)},
          {"param_bytes", kernel.param_bytes},
          {"registers", kernel.registers},
          {"static_shared", kernel.static_shared},
          {"stack", kernel.stack},
          {"barriers", kernel.barriers},
          {"required_block", triple(kernel.required_block)},
          {"max_block", triple(kernel.max_block)},
          {"cluster", triple(kernel.cluster)},
          {"uses_dynamic_shared", kernel.uses_dynamic_shared},
          {"grid_in_clusters", kernel.grid_in_clusters}};
}

json to_json(const PtxKernel& kernel) {
  const NamedKernel named(kernel_info_of(kernel));
  json params = json::array();
  for (const PtxParam& param : kernel.params) {
    params.push_back({{"index", param.index},
                      {"name", param.name},
                      {"type", param.type},
                      {"size", param.size},
                      {"alignment", param.alignment},
                      {"kind", kind_name(named.kernel.params[params.size()].kind)},
                      {"cpp_type", named.cpp_type(params.size())}});
  }
  return {{"name", kernel.name},
          {"cpp_name", named.cpp_name},
          {"params", std::move(params)},
          {"max_registers", kernel.max_registers != 0 ? json(kernel.max_registers) : json(nullptr)},
          {"required_block", triple(kernel.required_block)},
          {"max_block", triple(kernel.max_block)},
          {"cluster", triple(kernel.cluster)},
          {"uses_dynamic_shared", kernel.uses_dynamic_shared},
          {"grid_in_clusters", kernel.grid_in_clusters}};
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
          {"kernels", std::move(kernels)},
          {"variables", to_json(image.variables)}};
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
          {"kernels", std::move(kernels)},
          {"variables", to_json(ptx.variables)},
          {"imports", ptx.imports}};
}

std::string dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string image_to_json(const Image& image) { return dump(to_json(image)); }

}  // namespace torch_cubin
