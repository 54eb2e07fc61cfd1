// What csrc/ops_<family>.cpp register their ops with. Macros, because each names both an op and the
// C++ functions behind it.
#pragma once

#include <torch/csrc/stable/library.h>

#include "ops/common/dispatch.h"
#include "ops/common/op_calls.h"

// A public op that only forwards: with grad mode off to the raw op `_name`, else to
// `_name_autograd`. The strings after the name are its leading tensor arguments, for errors.
#define TC_BY_GRAD_MODE(name, ...)                                            \
  m.impl(name, [](StableIValue* stack, uint64_t, uint64_t) {                  \
    call_with_tensors(name, {__VA_ARGS__}, stack, [stack] {                   \
      call_by_grad_mode("cubin::_" name, "cubin::_" name "_autograd", stack); \
    });                                                                       \
  })

// name_cpu or name_cuda, whose calls that succeed are counted. The first argument is a tensor.
#define TC_COUNTED(name, device)                                                         \
  [](StableIValue* stack, uint64_t arguments, uint64_t results) {                        \
    static OpCalls& calls = op_calls_of(#name, #device);                                 \
    const int slot = OpCalls::slot(torch::stable::detail::to<AtenTensorHandle>(*stack)); \
    TORCH_BOX (&name##_##device)(stack, arguments, results);                             \
    calls.add(slot);                                                                     \
  }

// `_name` runs name_cpu or name_cuda; so does `_name_autograd`, which has a derivative besides.
#define TC_RAW(name, device) m.impl("_" #name, TC_COUNTED(name, device))
#define TC_RAW_AND_AUTOGRAD(name, device) \
  TC_RAW(name, device);                   \
  m.impl("_" #name "_autograd", TC_COUNTED(name, device))
