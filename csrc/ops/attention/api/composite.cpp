// The public ops scaled_dot_product_attention and flash_attention, which call the raw ops or, if
// the call may be differentiated, their autograd variants. ops/common/dispatch.h says what such ops
// may do: they must not read sizes, but may read a rank.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cubin/error.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/api/signatures.h"
#include "ops/common/dispatch.h"

namespace torch_cubin {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// Calls cubin::_attention_forward, _attention_forward_e4m3 or the autograd variant of either for
// another public op, the `caller`, which errors name instead.
//
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

// flash_attention: attention_forward for tensors in the layout of the FlashAttention package,
// (batch, rows, heads, head_dim), or (rows of all sequences, heads, head_dim) with cu_seqlens. It
// only makes views and fills in defaults, by ops that torch.compile, autograd and vmap see.

int64_t rank(const Tensor& tensor) {
  int64_t dim = 0;
  if (aoti_torch_get_dim(tensor.get(), &dim) != AOTI_TORCH_SUCCESS) {
    fail({"input", "a tensor argument", "could not be read", "a defined tensor", "", ""});
  }
  return dim;
}

// A layout that an argument can have; the heads are always the second last dim.
struct PackedLayout {
  int64_t dims;
  const char* text;
};
constexpr PackedLayout kPlain = {4, "(batch, rows, heads, head_dim)"};
constexpr PackedLayout kVarlen = {3, "(rows of all sequences, heads, head_dim), with cu_seqlens"};

void check_rank(const char* name, const Tensor& tensor, int64_t expected, const std::string& text) {
  const int64_t dims = rank(tensor);
  if (dims == expected) return;
  fail({"input", std::string("flash_attention argument '") + name + "'", "has a wrong rank", text,
        counted(static_cast<uint64_t>(dims), "dimension"), ""});
}

// Views of the tensors packed in one, as (..., `count`, heads, head_dim). It uses one unbind
// instead of a select for each, because the derivative of unbind writes the packed gradient once.
std::vector<Tensor> unpack_views(const char* name, const Tensor& tensor, const PackedLayout& layout,
                                 size_t count) {
  const std::string dim = count == 3 ? "3" : "2";
  check_rank(name, tensor, layout.dims + 1,
             (layout.dims == 4 ? "(batch, rows, " : "(rows of all sequences, ") + dim +
                 ", heads, head_dim) where " + (count == 3 ? "key and value are" : "value is") +
                 " not given");
  StableIValue stack[] = {from(tensor), from(layout.dims - 2)};
  call_op("aten::unbind", "int", stack);
  std::vector<Tensor> parts = to<std::vector<Tensor>>(stack[0]);
  if (parts.size() != count) {
    fail({"input", std::string("flash_attention argument '") + name + "'",
          "holds a wrong number of packed tensors",
          dim + " at dimension " + std::to_string(layout.dims - 2), std::to_string(parts.size()),
          ""});
  }
  return parts;
}

// Query, key and value, each with layout.dims dims.
std::vector<Tensor> separate(const PackedLayout& layout, const Tensor& query,
                             const OptionalTensor& key, const OptionalTensor& value) {
  if (!key) {
    if (value) {
      fail({"input", "flash_attention argument 'value'", "is given without 'key'",
            "both, or 'key' alone with both packed into it, or neither", "'value' alone", ""});
    }
    return unpack_views("query", query, layout, 3);
  }
  check_rank("query", query, layout.dims, layout.text);
  if (!value) {
    std::vector<Tensor> all = unpack_views("key", *key, layout, 2);
    all.insert(all.begin(), query);
    return all;
  }
  check_rank("key", *key, layout.dims, layout.text);
  check_rank("value", *value, layout.dims, layout.text);
  return {query, *key, *value};
}

bool is_e4m3(const Tensor& tensor) {
  int32_t dtype = 0;
  if (aoti_torch_get_dtype(tensor.get(), &dtype) != AOTI_TORCH_SUCCESS) return false;
  return dtype == aoti_torch_dtype_float8_e4m3fn();
}

// The first result of a raw op, or of its autograd variant if the call may be differentiated.
Tensor attend(const char* raw, const char* autograd, const AttentionSignature& signature,
              const std::vector<Tensor>& qkv, const AttentionOptions& options) {
  StableIValue stack[kMostArguments];
  signature.give(options, stack);
  for (size_t i = 0; i < 3; ++i) stack[i] = from(qkv[i]);
  call_attention_forward(differentiable() ? autograd : raw, "flash_attention", stack);
  Tensor out = to<Tensor>(stack[0]);
  to<Tensor>(stack[1]);  // releases the logsumexp
  return out;
}

// Refuses options that only float8_e4m3fn has, and those that it lacks.
void check_e4m3_options(bool e4m3, const AttentionOptions& options) {
  const bool has_descale = options.q_descale || options.k_descale || options.v_descale;
  if (!e4m3 && has_descale) {
    fail({"input", "flash_attention", "is given factors without a query of float8_e4m3fn",
          "none of 'q_descale', 'k_descale' and 'v_descale'", "some", ""});
  }
  if (!e4m3 || !e4m3_signature().lacks_one_of(options)) return;
  fail({"input", "flash_attention of float8_e4m3fn", "has options that it does not take",
        "none of " + flash_signature().names_missing_in(e4m3_signature()), "some",
        "Convert query, key and value with .to(torch.bfloat16)."});
}

// (batch, rows, heads, head_dim) from (batch, heads, rows, head_dim), and back.
Tensor swap_heads(const Tensor& tensor) {
  return call_tensor_op("aten::transpose", "int", tensor, int64_t{1}, int64_t{2});
}

Tensor flash_attention(const Tensor& query, const OptionalTensor& key, const OptionalTensor& value,
                       AttentionOptions options) {
  if (!query.defined()) fail_undefined("flash_attention", "query");
  const bool e4m3 = is_e4m3(query);
  check_e4m3_options(e4m3, options);
  const bool varlen = options.cu_seqlens_q || options.cu_seqlens_k;
  std::vector<Tensor> qkv = separate(varlen ? kVarlen : kPlain, query, key, value);
  if (!varlen) {
    for (Tensor& tensor : qkv) tensor = swap_heads(tensor);
  }
  // Drawn before the stack is filled, because nobody would release its handles if this threw.
  if (options.dropout_p > 0) options.dropout_seed = draw_seed(query.get());
  // Rows that are packed together share one set of offsets.
  if (!key && !value && !options.cu_seqlens_k) {
    options.cu_seqlens_k = options.cu_seqlens_q;
    if (options.max_seqlen_k == 0) options.max_seqlen_k = options.max_seqlen_q;
  }
  options.enable_gqa = true;  // the numbers of heads determine the sharing
  Tensor out =
      e4m3 ? attend("cubin::_attention_forward_e4m3", "cubin::_attention_forward_e4m3_autograd",
                    e4m3_signature(), qkv, options)
           : attend("cubin::_attention_forward", "cubin::_attention_forward_autograd",
                    forward_signature(), qkv, options);
  // Already contiguous if query's dims have this order in memory, packed or not (output_strides).
  return call_tensor_op("aten::contiguous", "", varlen ? out : swap_heads(out),
                        torch::headeronly::MemoryFormat::Contiguous);
}

}  // namespace

void scaled_dot_product_attention_composite(StableIValue* stack, uint64_t, uint64_t) {
  call_with_tensors("scaled_dot_product_attention", {"query", "key", "value"}, stack,
                    [stack] { call_scaled_dot_product_attention(stack); });
}

void flash_attention_composite(StableIValue* stack, uint64_t, uint64_t) {
  AttentionOptions options = flash_signature().take(stack);
  const auto query = to<Tensor>(stack[0]);
  const auto key = to<OptionalTensor>(stack[1]), value = to<OptionalTensor>(stack[2]);
  stack[0] = from(flash_attention(query, key, value, std::move(options)));
}

}  // namespace torch_cubin
