// The public ops forward through the dispatcher, and do nothing else.
//
// NOTE: reading a size here would make torch.compile build one graph a size, and calling a kernel
// directly would hand it tensors without data. So the boxed arguments pass through untouched,
// which also saves the wrapping of every tensor: the callee takes the stack over as it came.
//
// Who owns the arguments: a boxed kernel does, from its first line on, and PyTorch gives nothing back
// where it throws. So each of them either hands the whole stack to call_op, which takes it over
// whether the call succeeds or not, or gives back what it holds before it throws. TORCH_BOX does the
// latter for kernels with ordinary arguments, BoxedArguments for declared ops
// (declared/boxed_arguments.h).
#include "ops/common/composite.h"

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "ops/common/dispatch.h"

namespace torch_cubin {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

void forward(const char* raw, const char* autograd, StableIValue* stack) {
  call_op(differentiable() ? autograd : raw, "", stack);
}

// The boxed seed for the arguments of scaled_dot_product_attention. Where the draw throws (vmap with
// randomness "error" refuses it), the arguments are given back.
StableIValue draw_seed_for_attention(StableIValue* stack) {
  try {
    return from(std::optional<Tensor>(draw_seed(to<AtenTensorHandle>(stack[0]))));
  } catch (...) {
    // Each conversion takes an argument over, and its result lets it go; numbers own nothing.
    for (int i = 0; i < 3; ++i) to<Tensor>(stack[i]);
    to<std::optional<Tensor>>(stack[3]);
    to<std::optional<double>>(stack[6]);
    throw;
  }
}

}  // namespace

void matmul_composite(StableIValue* stack, uint64_t, uint64_t) {
  forward("cubin::_matmul", "cubin::_matmul_autograd", stack);
}

void linear_composite(StableIValue* stack, uint64_t, uint64_t) {
  forward("cubin::_linear", "cubin::_linear_autograd", stack);
}

// Arguments: query, key, value, attn_mask, dropout_p, is_causal; scale, enable_gqa. The op below
// takes the dropout's seed between them: random numbers never hide inside a raw op, where
// torch.compile would merge two calls or replay one.
void scaled_dot_product_attention_composite(StableIValue* stack, uint64_t, uint64_t) {
  const StableIValue seed =
      to<double>(stack[4]) > 0 ? draw_seed_for_attention(stack) : from(std::nullopt);
  if (!differentiable()) {
    StableIValue raw[] = {stack[0], stack[1], stack[2], stack[3], stack[4],
                          stack[5], seed,     stack[6], stack[7]};
    call_op("cubin::_scaled_dot_product_attention", "", raw);
    stack[0] = raw[0];
    return;
  }
  const StableIValue none = from(std::nullopt);
  StableIValue all[] = {stack[0],
                        stack[1],
                        stack[2],
                        stack[3],
                        stack[4],
                        stack[5],
                        seed,
                        stack[6],
                        stack[7],
                        from(int64_t{-1}),
                        from(int64_t{-1}),
                        from(false),
                        from(0.0),
                        none,
                        none,
                        none,
                        none,
                        from(int64_t{0}),
                        from(int64_t{0})};
  call_attention_forward("cubin::_attention_forward_autograd", "scaled_dot_product_attention", all);
  stack[0] = all[0];
  to<Tensor>(all[1]);  // takes the logsumexp over, and lets it go
}

void attention_forward_composite(StableIValue* stack, uint64_t, uint64_t) {
  forward("cubin::_attention_forward", "cubin::_attention_forward_autograd", stack);
}

void attention_backward_composite(StableIValue* stack, uint64_t, uint64_t) {
  forward("cubin::_attention_backward", "cubin::_attention_backward_autograd", stack);
}

}  // namespace torch_cubin
