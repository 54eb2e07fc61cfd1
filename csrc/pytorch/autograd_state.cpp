#include "pytorch/autograd_state.h"

#include <cstdint>
#include <memory>

#include "cubin/error.h"
#include "pytorch/internals.h"

namespace torch_cubin {
namespace {

// torch::autograd::ForwardADLevel::try_get_by_idx, whose result is only compared with null. Every
// std::shared_ptr is returned in the same manner, so the pointee's type need not be known.
using TryGetLevel = std::shared_ptr<void> (*)(uint64_t index);

// at::functorch::getDynamicLayerStack(). A reference is returned as an address, and a std::vector
// begins with the addresses of its first element and of its end.
using LayerStack = const void* const* (*)();

// c10::TensorImpl::requires_grad() const. A handle is the address of an at::Tensor, which holds one
// pointer: to the TensorImpl.
using RequiresGrad = bool (*)(const void* tensor_impl);

// torch::autograd::impl::bump_version(const at::Tensor&).
using BumpVersion = void (*)(const void* tensor);

template <class Function>
Function find_function(const char* symbol) {
  return reinterpret_cast<Function>(pytorch_symbol(symbol));
}

}  // namespace

bool dual_level_is_open() {
  static const auto getter =
      find_function<TryGetLevel>("_ZN5torch8autograd14ForwardADLevel14try_get_by_idxEm");
  return getter != nullptr && getter(0) != nullptr;  // PyTorch opens levels from 0 on
}

bool transform_is_active() {
  static const auto getter = find_function<LayerStack>("_ZN2at9functorch20getDynamicLayerStackEv");
  if (getter == nullptr) return true;
  const void* const* const layers = getter();
  return layers[0] != layers[1];
}

bool requires_grad(AtenTensorHandle tensor) {
  static const auto getter = find_function<RequiresGrad>("_ZNK3c1010TensorImpl13requires_gradEv");
  return getter == nullptr || getter(*reinterpret_cast<void* const*>(tensor));
}

void bump_version(AtenTensorHandle tensor) {
  static const auto bump =
      find_function<BumpVersion>("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
  if (bump == nullptr) {
    fail({"internal", "PyTorch", "has no function that counts a tensor's versions",
          "torch::autograd::impl::bump_version in libtorch_cpu.so", "none",
          "Use a version of PyTorch that torch_cubin was tested with."});
  }
  bump(tensor);
}

}  // namespace torch_cubin
