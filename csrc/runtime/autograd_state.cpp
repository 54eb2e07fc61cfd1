#include "runtime/autograd_state.h"

#include <cstdint>
#include <memory>

#include "driver/dl.h"

namespace torch_cubin {
namespace {

// torch::autograd::ForwardADLevel::try_get_by_idx, whose result is only compared with null. Any
// std::shared_ptr is returned the same way, so the pointee's type need not be known.
using TryGetLevel = std::shared_ptr<void> (*)(uint64_t index);

TryGetLevel find_getter() {
  void* library = dl_loaded("libtorch_cpu.so");
  return library == nullptr ? nullptr
                            : reinterpret_cast<TryGetLevel>(dl_symbol(
                                  library, "_ZN5torch8autograd14ForwardADLevel14try_get_by_idxEm"));
}

}  // namespace

bool dual_level_is_open() {
  static const TryGetLevel getter = find_getter();
  return getter != nullptr && getter(0) != nullptr;  // PyTorch opens levels from 0 on
}

}  // namespace torch_cubin
