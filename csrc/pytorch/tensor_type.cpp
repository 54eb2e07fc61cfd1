#include "pytorch/tensor_type.h"

#include <atomic>

#include "cubin/error.h"
#include "pytorch/tensor.h"

namespace torch_cubin {
namespace {

std::atomic<FindTensorType> find_type{nullptr};

}  // namespace

void set_find_tensor_type(FindTensorType find) { find_type = find; }

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
  fail({"input", std::string(op) + " argument " + std::to_string(argument),
        "has elements but no memory", "a tensor whose storage is allocated",
        tensor_type_text(tensor), "Pass what a wrapper wraps."});
}

}  // namespace torch_cubin
