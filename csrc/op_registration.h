// Op registration for csrc/ops_<family>.cpp. These are macros because each derives the op's name
// and the C++ functions' names from one argument.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <vector>

#include "ops/common/dispatch.h"
#include "ops/common/op_calls.h"
#include "pytorch/tensor_type.h"

namespace torch_cubin {

template <class Other>
void require_memory_of(const char*, size_t, const Other&) {}
inline void require_memory_of(const char* op, size_t argument, const Tensor& tensor) {
  require_memory(op, argument, tensor.get());
}
inline void require_memory_of(const char* op, size_t argument,
                              const std::optional<Tensor>& tensor) {
  if (tensor) require_memory(op, argument, tensor->get());
}
template <class Item>
void require_memory_of(const char* op, size_t argument, const std::vector<Item>& items) {
  for (const Item& item : items) require_memory_of(op, argument, item);
}
template <class Item>
void require_memory_of(const char* op, size_t argument,
                       const std::optional<std::vector<Item>>& items) {
  if (items) require_memory_of(op, argument, *items);
}

// Wraps the function to throw [input] for a tensor without memory, because some ops of ATen, which
// the CPU references call, crash on it.
template <const char* kOp, auto kFunction>
struct WithMemory;
template <const char* kOp, class Result, class... Args, Result (*kFunction)(Args...)>
struct WithMemory<kOp, kFunction> {
  static Result call(Args... args) {
    size_t argument = 0;
    (require_memory_of(kOp, ++argument, args), ...);
    return kFunction(args...);
  }
};

using OpLibrary = torch::stable::detail::StableLibrary;

// Defines the raw op `_name` and `_name_autograd`, which has a derivative; `schema` begins with the
// arguments.
inline void define_raw(OpLibrary& m, const std::string& name, const std::string& schema) {
  m.def(("_" + name + schema).c_str());
  m.def(("_" + name + "_autograd" + schema).c_str());
}

// Defines the public op as well.
inline void define_public(OpLibrary& m, const std::string& name, const std::string& schema) {
  m.def((name + schema).c_str());
  define_raw(m, name, schema);
}

}  // namespace torch_cubin

// Registers a public op that only forwards: to the raw op `_name` with grad mode off, else to
// `_name_autograd`. The strings after the name are its leading tensor arguments, for errors.
#define TC_BY_GRAD_MODE(name, ...)                                            \
  m.impl(name, [](StableIValue* stack, uint64_t, uint64_t) {                  \
    call_with_tensors(name, {__VA_ARGS__}, stack, [stack] {                   \
      call_by_grad_mode("cubin::_" name, "cubin::_" name "_autograd", stack); \
    });                                                                       \
  })

// The same if the strings name all of its tensors: with grad mode on to the raw op, too, where no
// gradient can be taken.
#define TC_BY_REQUIRES_GRAD(name, ...)                                       \
  m.impl(name, [](StableIValue* stack, uint64_t, uint64_t) {                 \
    call_with_tensors(name, {__VA_ARGS__}, stack, [stack] {                  \
      constexpr const char* kTensors[] = {__VA_ARGS__};                      \
      call_by_grad_mode("cubin::_" name, "cubin::_" name "_autograd", stack, \
                        {static_cast<int>(std::size(kTensors)), 0});         \
    });                                                                      \
  })

// The function itself checks what its kernel reads; the references are checked here.
#define TC_CHECKED_cpu(name) WithMemory<kOp, &name##_cpu>::call
#define TC_CHECKED_cuda(name) name##_cuda

// Wraps a boxed kernel of `_name` to count successful calls. The first argument must be a tensor.
#define TC_COUNTED(name, device, ...)                                                    \
  [](StableIValue* stack, uint64_t arguments, uint64_t results) {                        \
    [[maybe_unused]] static constexpr char kOp[] = #name;                                \
    static OpCalls& calls = op_calls_of(#name, #device);                                 \
    const int slot = OpCalls::slot(torch::stable::detail::to<AtenTensorHandle>(*stack)); \
    (__VA_ARGS__)(stack, arguments, results);                                            \
    calls.add(slot);                                                                     \
  }

// TC_BOXED registers a boxed kernel for `_name`; TC_BOXED_AND_AUTOGRAD also for `_name_autograd`,
// which has a derivative. TC_RAW and TC_RAW_AND_AUTOGRAD register name_cpu or name_cuda.
#define TC_BOXED(name, device, ...) m.impl("_" #name, TC_COUNTED(name, device, __VA_ARGS__))
#define TC_BOXED_AND_AUTOGRAD(name, device, ...) \
  TC_BOXED(name, device, __VA_ARGS__);           \
  m.impl("_" #name "_autograd", TC_COUNTED(name, device, __VA_ARGS__))
#define TC_RAW(name, device) TC_BOXED(name, device, TORCH_BOX(&TC_CHECKED_##device(name)))
#define TC_RAW_AND_AUTOGRAD(name, device) \
  TC_BOXED_AND_AUTOGRAD(name, device, TORCH_BOX(&TC_CHECKED_##device(name)))
// `_name.below_autograd`, which graphs call: it has no kernel on an Autograd key.
#define TC_BELOW_AUTOGRAD(name, device) \
  m.impl("_" #name ".below_autograd",   \
         TC_COUNTED(name, device, TORCH_BOX(&TC_CHECKED_##device(name))))
// The out= form of `_name`, by one function for both devices.
#define TC_OUT(name, device) \
  m.impl("_" #name ".out", TC_COUNTED(name, device, TORCH_BOX(&name##_to)))
