#include "pytorch/tensor_type.h"

#include <atomic>

#include "cubin/error.h"
#include "pytorch/tensor.h"

namespace torch_cubin {
namespace {

std::atomic<FindTensorType> find_type{nullptr};
std::atomic<FindArgument> find_argument{nullptr};

std::string argument_text(const char* op, size_t argument) {
  const FindArgument find = find_argument;
  char name[128] = "";
  if (find != nullptr) find(op, argument, name, sizeof(name));
  return name[0] == '\0' ? std::to_string(argument) : "'" + std::string(name) + "'";
}

}  // namespace

void set_error_names(FindTensorType type, FindArgument argument) {
  find_type = type;
  find_argument = argument;
}

std::string tensor_type_text(AtenTensorHandle tensor) {
  const FindTensorType find = find_type;
  char name[128] = "";
  // A handle points to an at::Tensor, whose only member is the address of its implementation.
  if (find != nullptr) find(*reinterpret_cast<void* const*>(tensor), name, sizeof(name));
  return name[0] == '\0' ? "a tensor" : "a " + std::string(name);
}

void require_memory(const char* op, size_t argument, AtenTensorHandle tensor) {
  int64_t elements = 0;
  void* data = nullptr;
  if (aoti_torch_get_numel(tensor, &elements) != 0 || elements == 0) return;
  if (aoti_torch_get_data_ptr(tensor, &data) == 0 && is_memory(data, tensor)) return;
  fail({"input", std::string(op) + " argument " + argument_text(op, argument),
        "has elements but no memory", "a tensor whose storage is allocated",
        tensor_type_text(tensor), "Pass what a wrapper wraps."});
}

}  // namespace torch_cubin
