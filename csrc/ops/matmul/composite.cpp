#include "ops/matmul/composite.h"

#include "ops/common/dispatch.h"

namespace torch_cubin {

void matmul_composite(StableIValue* stack, uint64_t, uint64_t) {
  call_by_grad_mode("cubin::_matmul", "cubin::_matmul_autograd", stack);
}

void linear_composite(StableIValue* stack, uint64_t, uint64_t) {
  call_by_grad_mode("cubin::_linear", "cubin::_linear_autograd", stack);
}

}  // namespace torch_cubin
