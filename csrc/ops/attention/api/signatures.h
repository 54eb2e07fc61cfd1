// The schemas of the attention family's ops, and what takes a call's arguments by them: the boxed
// kernels of the raw ops, which call the entry points of either device, and the checks of calls
// that Python describes.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ops/attention/api/attention.h"
#include "ops/attention/compose/softmax.h"

namespace torch_cubin {

// The arguments of one op: tensors, then options.
template <class Options>
class Signature {
 public:
  // `options`: their names in the order of the schema, "*" before the keyword-only ones;
  // "name=True" overrides the list's default, "name=" makes the argument a required one.
  Signature(const std::string& tensors, const std::string& options, const std::string& results)
      : results_(results), tensors_(1) {
    for (const char c : tensors) tensors_ += c == ',' ? 1 : 0;
    arguments_ = tensors;
    const std::string all = options + " ";
    for (size_t at = 0; at < all.size();) {
      const size_t end = all.find(' ', at);
      const std::string given = all.substr(at, end - at);
      at = end + 1;
      const size_t equals = given.find('=');
      for (size_t i = 0; i < Options::entries().size(); ++i) {
        if (given.substr(0, equals) == Options::entries()[i].name) places_.push_back(i);
      }
      arguments_ += ", ";
      if (given == "*") {
        arguments_ += given;
        continue;
      }
      const std::string& schema = Options::entries()[places_.back()].schema;
      const std::string own = equals == std::string::npos ? "" : given.substr(equals);
      arguments_ +=
          own.empty() ? schema : schema.substr(0, schema.find('=')) + (own == "=" ? "" : own);
    }
  }

  std::string schema(const std::string& op) const {
    return op + "(" + arguments_ + ") -> " + results_;
  }

  int64_t size() const { return tensors_ + static_cast<int64_t>(places_.size()); }

  // The options after the tensors in `stack`; consumes them.
  Options take(const StableIValue* stack) const {
    Options options;
    for (size_t i = 0; i < places_.size(); ++i) entry(i).take(options, stack[tensors_ + i]);
    return options;
  }

  void give(const Options& options, StableIValue* stack) const {
    for (size_t i = 0; i < places_.size(); ++i) stack[tensors_ + i] = entry(i).give(options);
  }

  // Moves the arguments from the stack of an op that has the same number of tensors and no
  // additional options; options that it lacks get their defaults.
  void move_from(const Signature& other, const StableIValue* from, StableIValue* to) const {
    give(Options(), to);  // the default of a tensor option is none, which owns nothing
    for (int64_t i = 0; i < tensors_; ++i) to[i] = from[i];
    for (size_t i = 0; i < places_.size(); ++i) {
      const int64_t place = other.place(entry(i).name);
      if (place >= 0) to[tensors_ + i] = from[place];
    }
  }

  // Index of an option in a stack; -1 if the op does not have it.
  int64_t place(const std::string& name) const {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (name == entry(i).name) return tensors_ + static_cast<int64_t>(i);
    }
    return -1;
  }

  // Throws [input] if a tensor has elements but no memory.
  void require_memory(const char* op, const Options& options,
                      std::initializer_list<const Tensor*> tensors) const {
    size_t argument = 0;
    for (const Tensor* tensor : tensors) {
      torch_cubin::require_memory(op, ++argument, tensor->get());
    }
    for (size_t i = 0; i < places_.size(); ++i, ++argument) {
      const AtenTensorHandle tensor = entry(i).tensor(options);
      if (tensor != nullptr) torch_cubin::require_memory(op, argument + 1, tensor);
    }
  }

  // The names of the options that `other` lacks: "'softcap', 'alibi_slopes' and 'sinks'".
  std::string names_missing_in(const Signature& other) const {
    std::string names, last;
    for (size_t i = 0; i < places_.size(); ++i) {
      if (other.place(entry(i).name) >= 0) continue;
      if (!last.empty()) names += (names.empty() ? "" : ", ") + last;
      last = std::string("'") + entry(i).name + "'";
    }
    return names.empty() ? last : names + " and " + last;
  }

  // Whether an option is given that the op does not have.
  bool lacks_one_of(const Options& options) const {
    for (const OptionEntry<Options>& each : Options::entries()) {
      if (each.given(options) && place(each.name) < 0) return true;
    }
    return false;
  }

 private:
  const OptionEntry<Options>& entry(size_t i) const { return Options::entries()[places_[i]]; }

  std::string arguments_, results_;
  int64_t tensors_;
  std::vector<size_t> places_;  // index in the list for each of its options
};

using AttentionSignature = Signature<AttentionOptions>;

constexpr int kMostArguments = 32;  // of one op, for its stack

const AttentionSignature& sdpa_signature();      // of the public op
const AttentionSignature& raw_sdpa_signature();  // with the dropout seed
const AttentionSignature& forward_signature();
const AttentionSignature& backward_signature();
const AttentionSignature& e4m3_signature();
const AttentionSignature& e4m3_backward_signature();
const AttentionSignature& flash_signature();
const AttentionSignature& softmax_signature();  // of the private ops of composed attention
const AttentionSignature& softmax_backward_signature();
const AttentionSignature& dropout_signature();
const Signature<KvCacheOptions>& kv_cache_signature();

// The checks of a call whose tensors are described: {"op": ..., "tensors": {name: ...},
// "options": {name: number}}. Throws [input].
void check_described_attention(const nlohmann::json& call);

// For the references (kReference), each tensor is checked to have memory: they call ops of ATen,
// some of which crash without it. The functions that launch kernels check what they read.
template <bool kReference>
AttentionArguments take_attention(const char* op, const AttentionSignature& signature,
                                  const StableIValue* stack) {
  using torch::stable::detail::to;
  AttentionOptions options = signature.take(stack);
  AttentionArguments arguments = {op, to<Tensor>(stack[0]), to<Tensor>(stack[1]),
                                  to<Tensor>(stack[2]), std::move(options)};
  if constexpr (kReference) {
    signature.require_memory(op, arguments.options,
                             {&arguments.query, &arguments.key, &arguments.value});
  }
  return arguments;
}

template <auto* kForward, bool kReference>
void boxed_sdpa(StableIValue* stack, uint64_t, uint64_t) {
  AttentionArguments arguments =
      take_attention<kReference>("scaled_dot_product_attention", raw_sdpa_signature(), stack);
  stack[0] = torch::stable::detail::from(std::get<0>(kForward(std::move(arguments), false)));
}

// kE4m3: the same op for float8_e4m3fn, under its own name and schema, as below.
template <auto* kForward, bool kReference, bool kE4m3 = false>
void boxed_forward(StableIValue* stack, uint64_t, uint64_t) {
  AttentionArguments arguments =
      kE4m3 ? take_attention<kReference>("attention_forward_e4m3", e4m3_signature(), stack)
            : take_attention<kReference>("attention_forward", forward_signature(), stack);
  if (kE4m3) arguments.options.e4m3 = arguments.options.enable_gqa = true;
  const auto [out, logsumexp] = kForward(std::move(arguments), true);
  stack[0] = torch::stable::detail::from(out);
  stack[1] = torch::stable::detail::from(logsumexp);
}

template <auto* kBackward, bool kReference, bool kE4m3 = false>
void boxed_backward(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::to;
  const char* op = kE4m3 ? "attention_backward_e4m3" : "attention_backward";
  const AttentionSignature& signature = kE4m3 ? e4m3_backward_signature() : backward_signature();
  AttentionOptions options = signature.take(stack);
  if (kE4m3) options.e4m3 = options.enable_gqa = true;
  const auto grad_out = to<Tensor>(stack[0]);
  AttentionArguments arguments = {op, to<Tensor>(stack[1]), to<Tensor>(stack[2]),
                                  to<Tensor>(stack[3]), std::move(options)};
  const auto out = to<Tensor>(stack[4]), logsumexp = to<Tensor>(stack[5]);
  if constexpr (kReference) {
    signature.require_memory(
        op, arguments.options,
        {&grad_out, &arguments.query, &arguments.key, &arguments.value, &out, &logsumexp});
  }
  const auto [dq, dk, dv] = kBackward(std::move(arguments), grad_out, out, logsumexp);
  stack[0] = torch::stable::detail::from(dq);
  stack[1] = torch::stable::detail::from(dk);
  stack[2] = torch::stable::detail::from(dv);
}

// The private ops of composed attention (compose/softmax.h), on either device.
inline void boxed_softmax(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::to;
  const AttentionOptions options = softmax_signature().take(stack);
  const auto [probs, logsumexp] = attention_softmax(to<Tensor>(stack[0]), options);
  stack[0] = torch::stable::detail::from(probs);
  stack[1] = torch::stable::detail::from(logsumexp);
}

inline void boxed_softmax_backward(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::to;
  const AttentionOptions options = softmax_backward_signature().take(stack);
  const auto grad = to<Tensor>(stack[0]), probs = to<Tensor>(stack[1]);
  const auto grad_logsumexp = to<OptionalTensor>(stack[2]), scores = to<OptionalTensor>(stack[3]);
  stack[0] = torch::stable::detail::from(
      attention_softmax_backward(grad, probs, grad_logsumexp, scores, options));
}

inline void boxed_dropout(StableIValue* stack, uint64_t, uint64_t) {
  const AttentionOptions options = dropout_signature().take(stack);
  const auto probs = torch::stable::detail::to<Tensor>(stack[0]);
  stack[0] = torch::stable::detail::from(attention_dropout(probs, options));
}

template <auto* kAttend, bool kReference>
void boxed_kv_cache(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::to;
  KvCacheOptions options = kv_cache_signature().take(stack);
  KvCacheArguments arguments = {std::move(options), to<Tensor>(stack[0]), to<Tensor>(stack[1]),
                                to<Tensor>(stack[2])};
  if constexpr (kReference) {
    kv_cache_signature().require_memory("flash_attention_with_kvcache", arguments,
                                        {&arguments.q, &arguments.k_cache, &arguments.v_cache});
  }
  stack[0] = torch::stable::detail::from(kAttend(std::move(arguments)));
}

}  // namespace torch_cubin
