// The public op scaled_dot_product_attention; ops/common/dispatch.h says what such ops may do.
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "ops/attention/api/attention.h"
#include "ops/attention/api/signatures.h"
#include "ops/common/dispatch.h"

namespace torch_cubin {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// The boxed seed for the arguments of scaled_dot_product_attention. If the draw throws (vmap with
// randomness "error" refuses it), the arguments are released.
StableIValue draw_seed_for_attention(StableIValue* stack) {
  try {
    return from(std::optional<Tensor>(draw_seed(to<AtenTensorHandle>(stack[0]))));
  } catch (...) {
    // Each conversion takes ownership of an argument, and its result releases it.
    for (int i = 0; i < 3; ++i) to<Tensor>(stack[i]);
    sdpa_signature().take(stack);
    throw;
  }
}

// The op below takes the dropout's seed as an argument. A raw op must not draw random numbers
// itself, because torch.compile would merge two calls or replay one.
void call_scaled_dot_product_attention(StableIValue* stack) {
  const AttentionSignature& own = sdpa_signature();
  const bool drops = to<double>(stack[own.place("dropout_p")]) > 0;
  const StableIValue seed = drops ? draw_seed_for_attention(stack) : from(std::nullopt);
  const bool raw = !differentiable();
  const AttentionSignature& callee = raw ? raw_sdpa_signature() : forward_signature();
  StableIValue all[kMostArguments];
  callee.move_from(own, stack, all);
  all[callee.place("dropout_seed")] = seed;
  if (raw) {
    call_op("cubin::_scaled_dot_product_attention", "", all);
    stack[0] = all[0];
    return;
  }
  call_attention_forward("cubin::_attention_forward_autograd", "scaled_dot_product_attention", all);
  stack[0] = all[0];
  to<Tensor>(all[1]);  // releases the logsumexp
}

}  // namespace

// The callee cannot know its caller: an argument for it would be in every graph. So the error's
// text is changed when it is rethrown, which costs successful calls nothing.
void call_attention_forward(const char* op, const char* caller, StableIValue* stack) {
  try {
    call_op(op, "", stack);
  } catch (const std::runtime_error& error) {
    const bool e4m3 = std::string(op).find("_e4m3") != std::string::npos;
    const std::string callee = e4m3 ? "]: attention_forward_e4m3 " : "]: attention_forward ";
    const std::string text = error.what();
    const size_t at = text.find(callee);
    // Only if it is the object of the error, directly after the tag.
    if (text.rfind("torch_cubin [", 0) != 0 || at != text.find("]: ")) throw;
    throw std::runtime_error(text.substr(0, at) + "]: " + caller + " " +
                             text.substr(at + callee.size()));
  }
}

void scaled_dot_product_attention_composite(StableIValue* stack, uint64_t, uint64_t) {
  call_with_tensors("scaled_dot_product_attention", {"query", "key", "value"}, stack,
                    [stack] { call_scaled_dot_product_attention(stack); });
}

}  // namespace torch_cubin
