// Op registration for csrc/ops_<family>.cpp. These are macros because each derives the op's name
// and the C++ functions' names from one argument.
#pragma once

#include <torch/csrc/stable/library.h>

#include "ops/common/dispatch.h"
#include "ops/common/op_calls.h"

// Registers a public op that only forwards: to the raw op `_name` with grad mode off, else to
// `_name_autograd`. The strings after the name are its leading tensor arguments, for errors.
#define TC_BY_GRAD_MODE(name, ...)                                            \
  m.impl(name, [](StableIValue* stack, uint64_t, uint64_t) {                  \
    call_with_tensors(name, {__VA_ARGS__}, stack, [stack] {                   \
      call_by_grad_mode("cubin::_" name, "cubin::_" name "_autograd", stack); \
    });                                                                       \
  })

// Wraps name_cpu or name_cuda to count successful calls. The first argument must be a tensor.
#define TC_COUNTED(name, device)                                                         \
  [](StableIValue* stack, uint64_t arguments, uint64_t results) {                        \
    static OpCalls& calls = op_calls_of(#name, #device);                                 \
    const int slot = OpCalls::slot(torch::stable::detail::to<AtenTensorHandle>(*stack)); \
    TORCH_BOX (&name##_##device)(stack, arguments, results);                             \
    calls.add(slot);                                                                     \
  }

// TC_RAW registers name_cpu or name_cuda for `_name`; TC_RAW_AND_AUTOGRAD also for
// `_name_autograd`, which has a derivative.
#define TC_RAW(name, device) m.impl("_" #name, TC_COUNTED(name, device))
#define TC_RAW_AND_AUTOGRAD(name, device) \
  TC_RAW(name, device);                   \
  m.impl("_" #name "_autograd", TC_COUNTED(name, device))
