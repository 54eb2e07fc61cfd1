// The schemas of the attention family's ops: the options of each, in order; and how boxed arguments
// are taken from a stack and given to another op by them.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "ops/attention/problem/kv_cache.h"
#include "ops/attention/problem/options.h"

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

}  // namespace torch_cubin
